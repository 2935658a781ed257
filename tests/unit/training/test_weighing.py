"""However an update's batch is cut into parts, their weights make it the update of the whole.

The reference is NumPy's mean over the undivided batch. A part's gradient is that of its mean, so
the sum of what the parts weigh must be the whole's. Ranks take turns in one thread here.
"""

import numpy as np
import pytest
import torch

from fitkit.data.batches import Batch
from fitkit.errors import ConfigurationError
from fitkit.losses import Term
from fitkit.training.step import Outcome
from fitkit.training.weighing import Known, Late, about, correction, nothing_if, weighed

SEEDS = range(30)


class Cut:
    """An update's values, cut at random: for each rank and part, those of each of its samples.

    Attributes:
        parts: by rank and part, a list of samples; a sample is an array (values, width).
        weight: what is learned, (width,). A value's loss is its product with it.
    """

    def __init__(self, seed, *, most_values=6, fillers=True):
        draw = np.random.default_rng(seed)
        self.ranks, self.accumulate = int(draw.integers(1, 4)), int(draw.integers(1, 5))
        sizes = draw.integers(0 if fillers else 1, 5, (self.ranks, self.accumulate))
        sizes[0] = np.maximum(sizes[0], 1)  # rank 0 is the last to run out of rows
        self.parts = [
            [[draw.normal(size=(draw.integers(most_values), 3)) for _ in range(n)] for n in row]
            for row in sizes
        ]
        self.weight = torch.tensor(draw.normal(size=3), requires_grad=True)

    def batch(self, rank, part):
        return Batch(None, self.samples(rank, part), sum(self.samples(r, part) for r in self.all))

    def samples(self, rank, part):
        return len(self.parts[rank][part])

    @property
    def all(self):
        return range(self.ranks)

    def mean(self, values):
        """The mean of values as a net would give it: NaN of none."""
        return (torch.tensor(values) @ self.weight).mean()

    def averaged(self, backwards):
        """What a wrapper makes of the ranks' gradients.

        Args:
            backwards: by rank and part, what enters the backward.
        """
        for rank in backwards:
            for loss in rank:
                loss.backward()
        return self.weight.grad.numpy() / self.ranks


def of_each_sample(samples):
    """Each sample's mean: the values of a loss that is a mean over samples."""
    return [values.mean(0) if len(values) else np.zeros(3) for values in samples]


def flat(samples):
    return np.concatenate([np.zeros((0, 3)), *samples])


def filled(samples, values):
    """A batch's values; those of a row that doesn't count, in a batch that only fills."""
    return np.stack(values) if samples else np.full((1, 3), 7.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_samples_of_any_parts_weigh_the_same(seed):
    cut, backwards, factors = Cut(seed), [], []
    first = cut.batch(0, 0).total
    for rank in cut.all:
        group = Late(float(first * cut.accumulate), cut.ranks, asks=False)
        backwards.append([])
        for part in range(cut.accumulate):
            samples = cut.parts[rank][part]
            loss = cut.mean(filled(samples, of_each_sample(samples)))
            entering, count = group.part(cut.batch(rank, part), Outcome(loss))
            assert count == len(samples)
            backwards[-1].append(entering)
        factors.append(group.correction(lambda count: pytest.fail("each batch says the total")))
    assert len(set(factors)) == 1
    found = cut.averaged(backwards) * (1.0 if factors[0] is None else factors[0])
    whole = np.stack([v for row in cut.parts for samples in row for v in of_each_sample(samples)])
    np.testing.assert_allclose(found, whole.mean(0), rtol=1e-12, atol=1e-14)


def exactly(count):
    return count


def on_a_device(count):
    return torch.tensor(count, dtype=torch.float64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("expected", [1.0, 64.0, 0.37])
@pytest.mark.parametrize("kind", [exactly, on_a_device])
def test_values_of_any_parts_weigh_the_same_whatever_was_expected(seed, expected, kind):
    cut, backwards, groups = Cut(seed), [], []
    for rank in cut.all:
        group = Late(expected, cut.ranks, asks=True)
        backwards.append([])
        for part in range(cut.accumulate):
            samples = cut.parts[rank][part]
            counting = flat(samples)
            loss = cut.mean(counting if len(counting) or samples else filled(samples, []))
            entering, count = group.part(cut.batch(rank, part), Outcome(loss, kind(len(counting))))
            assert count == len(counting)
            backwards[-1].append(entering)
        groups.append(group)
    counted = sum(group.counted for group in groups)
    factor = groups[0].correction(lambda mine: counted)
    found = cut.averaged(backwards) * (1.0 if factor is None else float(factor))
    whole = np.concatenate([flat(samples) for row in cut.parts for samples in row])
    wanted = whole.mean(0) if len(whole) else np.zeros(3)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [exactly, on_a_device])
def test_weights_of_classes_count_as_they_are(seed, kind):
    cut, backwards, counted = Cut(seed, fillers=False), [], 0.0
    draw = np.random.default_rng(seed)
    groups = [Late(3.0, cut.ranks, asks=True) for _ in cut.all]
    above, below = np.zeros(3), 0.0
    for rank, group in enumerate(groups):
        backwards.append([])
        for part in range(cut.accumulate):
            values = flat(cut.parts[rank][part])
            weights = draw.uniform(0, 2, len(values))
            above, below = above + weights @ values, below + weights.sum()
            each = torch.tensor(values) @ cut.weight
            loss = (each * torch.tensor(weights)).sum() / max(weights.sum(), 1e-300)
            outcome = Outcome(loss, kind(float(weights.sum())))
            backwards[-1].append(group.part(cut.batch(rank, part), outcome)[0])
        counted = counted + group.counted
    factor = groups[-1].correction(lambda mine: counted)
    found = cut.averaged(backwards) * (1.0 if factor is None else float(factor))
    np.testing.assert_allclose(found, above / below if below else above, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [exactly, on_a_device])
def test_each_output_weighs_by_its_own_count(seed, kind):
    cut, backwards = Cut(seed), []
    values, scales = ("values", "samples"), (0.7, 2.0)
    wholes = [
        sum(len(flat(samples)) for row in cut.parts for samples in row),
        sum(len(samples) for row in cut.parts for samples in row),
    ]
    for rank in cut.all:
        left = [
            float(sum(len(flat(samples)) for samples in cut.parts[rank])),
            float(sum(len(samples) for samples in cut.parts[rank])),
        ]
        group = Known(wholes, dict(zip(values, left, strict=True)), cut.ranks)
        backwards.append([])
        for part in range(cut.accumulate):
            samples = cut.parts[rank][part]
            counting = flat(samples)
            of_samples = cut.mean(filled(samples, of_each_sample(samples)))
            terms = [
                Term("values", scales[0], cut.mean(counting), kind(len(counting))),
                Term("samples", scales[1], of_samples, None),
            ]
            outcome = Outcome(terms[0].value, None, terms)
            backwards[-1].append(group.part(cut.batch(rank, part), outcome)[0])
        assert group.correction(lambda mine: pytest.fail("nothing is left to ask")) is None
    whole = np.concatenate([flat(samples) for row in cut.parts for samples in row])
    each = np.stack([v for row in cut.parts for samples in row for v in of_each_sample(samples)])
    wanted = scales[1] * each.mean(0) + (scales[0] * whole.mean(0) if len(whole) else 0.0)
    np.testing.assert_allclose(cut.averaged(backwards), wanted, rtol=1e-12, atol=1e-14)


def test_a_number_that_only_the_forward_knew_is_refused():
    group = Known([9.0], {"a": 9.0}, 1)
    loss = torch.tensor(1.0)
    group.part(Batch(None, 2, 2), Outcome(loss, None, [Term("a", 1.0, loss, 7)]))
    with pytest.raises(ConfigurationError, match="The loss of a is a mean over values"):
        group.correction(exactly)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_estimate_of_the_whole_changes_no_bit(seed):
    """A power of 2 goes out of the gradients as it came in: a resumed fit may guess otherwise."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 200, 4)
    values = draw.normal(size=4).astype(np.float32)
    found = []
    for count in (counts[0], counts[1], 7 * counts[2]):
        group = Late(4 * 8 * about(float(count), 8), 1, asks=True)
        parts = zip(values, counts, strict=True)
        total = sum(
            group.part(Batch(None, 8, 8), Outcome(torch.tensor(value), float(count)))[0]
            for value, count in parts
        )
        factor = group.correction(exactly)
        found.append(total * (1.0 if factor is None else factor))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("count", [0.3, 1, 6, 8, 1000, 2**40 + 1])
def test_the_estimate_is_a_power_of_2_near_what_a_sample_counts(count):
    found = about(count, 8)
    mantissa, _ = np.frexp(found)
    assert mantissa == 0.5
    assert 1 / 2**0.5001 <= found / (count / 8) <= 2**0.5001


def test_nothing_is_known_of_a_part_without_counts():
    assert about(0.0, 8) == about(3.0, 0) == 1.0


def test_a_mean_over_nothing_is_nothing():
    weight = torch.tensor(2.0, requires_grad=True)
    for count in (0, 0.0, torch.tensor(0), torch.tensor(0.0, dtype=torch.float64)):
        entering = weighed(weight * float("nan"), count, 2, 8.0)
        assert entering.item() == 0.0
        assert nothing_if(torch.tensor(float("nan")), count).item() == 0.0
    assert nothing_if(weight, 3) is weight


def test_a_part_that_is_the_whole_enters_as_it_is():
    loss = torch.tensor(2.0)
    assert weighed(loss, 49, 3, 147.0) is loss
    assert correction(147.0, 147) is None
    assert correction(147.0, 0) is None
    assert correction(8.0, torch.tensor(0.0, dtype=torch.float64)) == 1.0
