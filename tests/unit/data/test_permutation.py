"""Orders of very many samples: computed, never kept."""

import contextlib
import itertools
import resource

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import fitkit
from fitkit.data import PermutationSampler, permutation
from fitkit.data.batches import Stream
from fitkit.data.permutation import IndexBatches, Permutation
from fitkit.data.sources import make_source
from fitkit.extras.data_on_ranks.sharding import sharded
from fitkit.progress import Progress
from tests.unit.extras.data_on_ranks.test_sharding import on_ranks

BILLION = 10**9


class Numbers(Dataset):
    """A data set whose samples are their indices, and a note of those that were read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert type(index) is int
        self.read.append(index)
        return torch.tensor([float(index % 7)]), torch.tensor([float(index)], dtype=torch.float64)


@contextlib.contextmanager
def flat_memory():
    """Asserts that the process's peak of memory grows by less than 200 MB.

    All indices of a billion samples would take 8 GB, as a tensor.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 200_000


def by_hand(position, count, seed):
    """The permutation once more, in Python's own whole numbers."""
    keys = [int(key) for key in np.random.SeedSequence(seed).generate_state(8, np.uint64)]
    bits = max((count - 1).bit_length(), 2)
    low_bits, high_bits = bits // 2, bits - bits // 2

    def mixed(number):
        number %= 1 << 64
        number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        number = (number ^ (number >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return number ^ (number >> 31)

    while True:
        low, high = position % (1 << low_bits), position >> low_bits
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            low ^= mixed(high + first) % (1 << low_bits)
            high ^= mixed(low + second) % (1 << high_bits)
        position = high << low_bits | low
        if position < count:
            return position


# ------------------------------------------------------------------------------ the permutation


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025, 70_001])
def test_each_sample_has_one_place(count):
    for seed in (0, 1, 2**63 - 1):
        found = Permutation(count, seed)(torch.arange(count))
        assert torch.equal(found.sort().values, torch.arange(count))


@pytest.mark.parametrize("count", [10, 1000, BILLION, 2**40 + 1])
def test_it_is_a_feistel_network_with_cycle_walking(count):
    positions = [0, 1, 2, count // 3, count // 2, count - 2, count - 1]
    found = Permutation(count, 5)(torch.tensor(positions))
    assert found.tolist() == [by_hand(position, count, 5) for position in positions]


def test_orders_stay_the_same_from_version_to_version():
    assert Permutation(10, 0)(torch.arange(10)).tolist() == [7, 0, 6, 1, 9, 8, 4, 3, 2, 5]
    assert Permutation(BILLION, 7)(torch.arange(3)).tolist() == [414641547, 113648471, 803909]


def test_orders_look_random():
    # Positions by where their samples are: 32 x 32 fields, each expected to have as many. Of random
    # permutations chi-square is 31 * 31 = 961 on average, with a standard deviation of 44.
    count = 1 << 17
    for seed in range(5):
        order = Permutation(count, seed)(torch.arange(count))
        fields = torch.bincount(torch.arange(count) // 4096 * 32 + order // 4096, minlength=1024)
        assert 961 - 5 * 44 < float(((fields - 128) ** 2 / 128).sum()) < 961 + 5 * 44
        # Neighbours are as far apart as any two samples: a third of all, give or take 0.07 %.
        steps = (order[1:] - order[:-1]).abs().double().mean() / count
        assert abs(float(steps) - 1 / 3) < 0.0035
    # How many samples stay in their places: of random permutations 1 on average.
    places = torch.arange(50)
    stay = [int((Permutation(50, seed)(places) == places).sum()) for seed in range(1000)]
    assert abs(np.mean(stay) - 1) < 0.16  # five standard deviations
    assert len({tuple(Permutation(50, seed)(places).tolist()) for seed in range(1000)}) == 1000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "size"), [(23, 4), (24, 4), (3, 4), (1, 1), (70_000, 30_000)])
def test_batches_are_those_of_the_whole_order_cut(samples, size, drop_last):
    order = Permutation(samples, 3)
    whole = list(order(torch.arange(samples)).split(size))
    if drop_last and len(whole[-1]) < size:
        whole.pop()
    batches = IndexBatches(samples, size, order, drop_last=drop_last)
    assert batches.full == sum(len(batch) == size for batch in whole)
    for found, expected in (
        (batches, whole), (batches[2:], whole[2:]), (batches[1::3], whole[1::3]),
        ([batches[i] for i in range(len(batches))], whole), (batches[1:][:2], whole[1:][:2]),
        (IndexBatches(samples, size)[:1], [torch.arange(samples)[:size]]),
    ):  # fmt: skip
        assert [b.tolist() for b in found] == [b.tolist() for b in expected]
    assert list(batches.lists()) == [b.tolist() for b in whole]


def test_a_sampler_gives_another_order_each_pass_which_a_generator_repeats():
    def passes():
        sampler = PermutationSampler(range(9), torch.Generator().manual_seed(4))
        return list(sampler), list(sampler), len(sampler)

    first, second, count = passes()
    assert sorted(first) == sorted(second) == list(range(9)) and first != second and count == 9
    assert passes() == (first, second, count)
    with pytest.raises(fitkit.ConfigurationError, match="data_source is empty"):
        PermutationSampler([])
    with pytest.raises(TypeError, match="must have a length"):
        PermutationSampler(iter([1]))


# ---------------------------------------------------------------------------- a billion samples


def first_of(source, number, skip, count):
    batches = itertools.islice(source.batches(number, skip), count)
    return [y.flatten().long().tolist() for _, y in batches]


def test_a_billion_samples_are_shuffled_and_resumed_in_flat_memory():
    source = make_source(Numbers(BILLION), batch_size=8, shuffle=True)
    middle = BILLION // 16
    with flat_memory():
        torch.manual_seed(3)
        begun = first_of(source, 0, 0, 3)
        torch.manual_seed(3)
        rest = first_of(source, 0, middle, 2)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()  # a loader's own, for its workers
    order = Permutation(BILLION, int(torch.empty((), dtype=torch.int64).random_()))
    at = torch.arange(24)
    assert sum(begun, []) == order(at).tolist()
    assert sum(rest, []) == order(at[:16] + middle * 8).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_pass_has_the_rest_of_the_one_that_was_cut(workers):
    loader = DataLoader(
        data := Numbers(1000), batch_size=8, sampler=PermutationSampler(data), num_workers=workers
    )
    torch.manual_seed(1)
    stream = Stream(make_source(loader), Progress())
    whole = [y.tolist() for _, y in stream.epoch()]
    assert sorted(i for batch in whole for (i,) in batch) == list(range(1000))
    torch.manual_seed(1)
    progress = Progress()
    Stream(make_source(loader), progress).epoch()
    torch.manual_seed(99)
    resumed = Stream(make_source(loader), Progress(batches=50, began=progress.began))
    assert [y.tolist() for _, y in resumed.epoch()] == whole[50:]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_deal_out_a_billion_samples_in_flat_memory(training, shuffle):
    size, middle = 3, 40_000_000

    def read(exchange):
        source = make_source(data := Numbers(BILLION), batch_size=8, shuffle=shuffle)
        shard = sharded(source, exchange, training=training, replace_sampler=True, scatter=False)
        batches = itertools.islice(shard.batches(0, middle * size), 4)
        counts = [(b.samples, b.total) for b in batches] if training else list(batches)
        return data.read, counts

    torch.manual_seed(3)
    with flat_memory():
        found = on_ranks(size, read)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    seed = int(torch.empty((), dtype=torch.int64).random_())
    positions = torch.arange(8 * size * 4) + middle * size * 8
    expected = Permutation(BILLION, seed)(positions) if shuffle else positions
    by_step = expected.view(4, size, 8)
    for rank, (chosen, counts) in enumerate(found):
        assert chosen == by_step[:, rank].flatten().tolist()
        if training:
            assert counts == [(8, 24)] * 4


@pytest.mark.parametrize("kind", ["set", "arrays", "loader of tensors"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [47, 48, 50, 5])
def test_ranks_shares_of_computed_orders_are_disjoint_and_complete(monkeypatch, kind, size, count):
    monkeypatch.setattr(permutation, "MANY", 5)
    x = torch.arange(float(count))

    def read(exchange):
        if kind == "arrays":
            source = make_source(x, batch_size=4, shuffle=True)
        elif kind == "set":
            source = make_source(Numbers(count), batch_size=4, shuffle=True)
        else:
            tensors = TensorDataset(x)
            loader = DataLoader(tensors, 4, sampler=PermutationSampler(tensors))
            source = make_source(loader)
        shard = sharded(source, exchange, training=True, replace_sampler=True, scatter=False)
        passes = [list(shard.batches(0)), list(shard.batches(0, skip=2 * size))]
        return [[(b.data[-1].flatten().tolist(), b.samples, b.total) for b in p] for p in passes]

    found = on_ranks(size, read)
    firsts = [first for first, _ in found]
    assert len({len(steps) for steps in firsts}) == 1
    for step in zip(*firsts, strict=True):
        assert sum(n for _, n, _ in step) == step[0][2]
    seen = [value for steps in firsts for values, n, _ in steps for value in values[:n]]
    assert sorted(seen) == x.tolist() and (count < 40 or seen != x.tolist())
    if kind == "arrays":  # whose order follows from the pass's number alone
        assert all(rest == first[2:] for first, rest in found)


def test_arrays_from_that_many_samples_on_have_a_computed_order(monkeypatch):
    x = torch.arange(20.0)
    source = make_source(x, batch_size=8, shuffle=True)
    source.seed = 5
    generator = torch.Generator().manual_seed(5 + 2)
    kept = torch.randperm(20, generator=generator)
    assert torch.equal(torch.cat([b for (b,) in source.batches(2)]), kept.float())
    monkeypatch.setattr(permutation, "MANY", 20)
    computed = Permutation(20, 5 + 2)(torch.arange(20))
    assert torch.equal(torch.cat([b for (b,) in source.batches(2)]), computed.float())
    assert torch.equal(torch.cat([b for (b,) in source.batches(2, skip=1)]), computed[8:].float())


def test_a_set_has_torch_s_order_below(monkeypatch):
    monkeypatch.setattr(permutation, "MANY", 21)
    torch.manual_seed(0)
    (_, y), *_ = make_source(Numbers(20), batch_size=20, shuffle=True).batches(0)
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert y.flatten().long().tolist() == list(RandomSampler(range(20)))


def test_a_loader_with_torch_s_own_shuffling_is_told_what_that_takes():
    with pytest.warns(UserWarning, match=r"1,000,000,000 samples.*40\.0 GB.*PermutationSampler"):
        make_source(DataLoader(Numbers(BILLION), shuffle=True))


def test_a_fit_on_a_billion_samples_resumes_as_if_nothing_had_happened(tmp_path):
    def train(data, **arguments):
        torch.manual_seed(2)
        model = fitkit.Model(torch.nn.Linear(1, 1, dtype=torch.float64))
        model.compile("sgd", lambda p, y: (p - y % 3).square().mean(), precision=64)
        model.fit(data, batch_size=4, steps_per_epoch=5, verbose=0, **arguments)
        return model

    whole, first, second = Numbers(BILLION), Numbers(BILLION), Numbers(BILLION)
    with flat_memory():
        expected = train(whole, epochs=3)
        train(first, epochs=1).save(tmp_path / "first.h5")
        found = train(second, epochs=3, resume_from=tmp_path / "first.h5")
        found.evaluate(Numbers(BILLION), batch_size=4, steps=3, verbose=0)
    assert torch.equal(expected.net.weight, found.net.weight)
    assert len(set(whole.read)) == 60 and set(second.read[-40:]) == set(whole.read[20:])


class Endless(IterableDataset):
    def __len__(self):
        return BILLION

    def __iter__(self):
        return ((torch.tensor([float(n % 5)]), torch.tensor([1.0])) for n in range(BILLION))


def test_a_stream_of_a_billion_samples_is_read_in_flat_memory():
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    with flat_memory():
        model.fit(Endless(), batch_size=2, steps_per_epoch=500, epochs=3, verbose=0)
        batches = ((torch.ones(2, 1), torch.ones(2, 1)) for _ in range(BILLION))
        model.fit(batches, steps_per_epoch=500, epochs=3, verbose=0)
