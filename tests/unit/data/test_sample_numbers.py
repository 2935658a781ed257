"""What a sample draws belongs to the sample: by the key, the pass, its index, and repeats."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

import fitkit
from fitkit.data.draws import DataDraws
from fitkit.data.generators import OF_THE_PROCESS, generators_in
from fitkit.data.seeded import Keys, Seeded
from fitkit.data.sources import make_source
from fitkit.errors import ArgumentTypeError
from tests.augmented import SAMPLES, Augmented, WithOwn, key_of, seeded_by_hand

KEY = 77


def read(loader, passes=2, key=KEY, skip=0):
    """The samples of each pass, by their first number, in the order of the batches."""
    source = make_source(loader)
    source.draws = DataDraws(key)
    found = []
    for number in range(passes):
        batches = source.batches(number, skip if number == 0 else 0)
        rows = torch.cat([batch[0] if isinstance(batch, list) else batch for batch in batches])
        found.append(rows[rows[:, 0].argsort(stable=True)])
    return torch.stack(found) if not skip else found


@pytest.mark.parametrize("every", [1, 17], ids=["always", "now and then"])
@pytest.mark.parametrize("kind", [Augmented, WithOwn])
def test_neither_workers_nor_batches_change_a_samples_numbers(kind, every):
    whole = read(DataLoader(kind(every), 8))
    drawn = whole[:, :, 1:].flatten()
    drawn = drawn[drawn != 0]
    assert len(drawn) == len(drawn.unique()) > SAMPLES // 4
    for loader in (
        DataLoader(kind(every), 5, shuffle=True),
        DataLoader(kind(every), 1),
        DataLoader(kind(every), 8, num_workers=2, shuffle=True),
        DataLoader(kind(every), 3, num_workers=3, persistent_workers=True, prefetch_factor=3),
    ):
        assert torch.equal(read(loader), whole)


def test_processes_that_begin_anew_draw_the_same():
    dataset = WithOwn()
    dataset.torch = None  # torch itself can't send a torch.Generator to a new process
    loader = DataLoader(dataset, 8, num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(read(loader, 1), read(DataLoader(dataset, 3), 1))


def test_the_numbers_are_those_of_a_loop_that_seeds_by_hand():
    for number, rows in enumerate(read(DataLoader(Augmented(), 8))):
        for index, row in enumerate(rows):
            seeded_by_hand(KEY, number, index)
            assert torch.equal(Augmented()[index][0], row)


def test_without_a_fit_the_key_is_of_the_state_in_which_a_pass_begins():
    torch.manual_seed(3)
    key = key_of(torch.get_rng_state())
    (batch,) = make_source(DataLoader(Augmented(), SAMPLES)).batches(0)
    seeded_by_hand(key, 0, 5)
    assert torch.equal(batch[0][5], Augmented()[5][0])


@pytest.mark.parametrize("kind", [Augmented, WithOwn])
@pytest.mark.parametrize("every", [1, 17])
@pytest.mark.parametrize("stored", [False, True])
def test_the_generators_outside_are_as_if_nothing_had_been_drawn(kind, every, stored):
    fitkit.set_seed(3)
    np.random.rand(5), random.random()
    if stored:  # each leaves a second number there
        np.random.randn(), random.gauss(0, 1)
    dataset = kind(every)
    own = generators_in(dataset)
    before = [one.mark(one.save()) for one in OF_THE_PROCESS], [str(vars(dataset))]
    whole = np.random.get_state()[1].tolist(), np.random.get_state()[2:], random.getstate()
    assert whole[1][1] == stored
    states = [g.get_state() for g in own.values() if isinstance(g, torch.Generator)]
    source = make_source(DataLoader(dataset, 8, generator=torch.Generator()))
    list(source.batches(0))
    assert [one.mark(one.save()) for one in OF_THE_PROCESS] == before[0]
    now = np.random.get_state()[1].tolist(), np.random.get_state()[2:], random.getstate()
    assert now == whole
    after = [g.get_state() for g in own.values() if isinstance(g, torch.Generator)]
    assert all(map(torch.equal, states, after))
    with pytest.raises(AttributeError):
        dataset.dataset  # noqa: B018


class Repeating:
    """Gives each index three times, in another order each time."""

    def __len__(self):
        return 3 * SAMPLES

    def __iter__(self):
        for _ in range(3):
            yield from torch.randperm(SAMPLES).tolist()


def test_a_sample_that_comes_again_draws_other_numbers():
    torch.manual_seed(0)
    rows = read(DataLoader(Augmented(), 8, sampler=Repeating()))
    assert len(rows[:, :, 1].unique()) == 2 * 3 * SAMPLES
    by_hand = []
    for again in range(3):
        seeded_by_hand(KEY, 0, 4, again)
        by_hand.append(Augmented()[4][0])
    assert torch.equal(rows[0, 12:15], torch.stack(by_hand))
    torch.manual_seed(0)
    again = DataLoader(Augmented(), 7, sampler=Repeating(), num_workers=2)
    assert torch.equal(read(again), rows)


class Wrapped(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


class AtOnce(Augmented):
    """Reads many samples at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: Subset(data, range(SAMPLES)[::-1]),
        lambda data: Subset(Subset(data, range(SAMPLES)), range(0, SAMPLES, 2)),
        lambda data: ConcatDataset([data, data]),
        Wrapped,
    ],
    ids=["subset", "subset of a subset", "concatenated", "wrapped"],
)
def test_data_sets_in_others_are_reached(wrap):
    whole = read(DataLoader(wrap(WithOwn()), 8))
    assert torch.equal(read(DataLoader(wrap(WithOwn()), 3, num_workers=2)), whole)
    assert len(whole[:, :, 4].unique()) == whole[:, :, 4].numel()


def test_samples_that_are_read_at_once_draw_by_the_first_of_them():
    whole = read(DataLoader(AtOnce(), 8))
    assert torch.equal(read(DataLoader(AtOnce(), 8, num_workers=2)), whole)
    seeded_by_hand(KEY, 0, 8)
    expected = torch.stack([x for x, _ in AtOnce().__getitems__([8, 9, 10])])
    assert torch.equal(whole[0][8:11], expected)


def noisy(samples):
    rows = torch.stack([x for x, _ in samples])
    return torch.cat([rows, torch.rand(len(rows), 1), rows.new_full((len(rows), 1), 0.0)], 1)


def test_a_collate_function_draws_by_the_batchs_number():
    whole = read(DataLoader(Augmented(100), 8, collate_fn=noisy), 1)[0]
    assert len(whole[:, -2].unique()) == SAMPLES
    seeded_by_hand(KEY, 0, 2, 1 << 63)
    assert torch.equal(whole[16:24, -2], torch.rand(8, 1)[:, 0])
    workers = DataLoader(Augmented(100), 8, collate_fn=noisy, num_workers=2)
    assert torch.equal(read(workers, 1)[0], whole)
    (rest,) = read(DataLoader(Augmented(100), 8, collate_fn=noisy), 1, skip=2)
    assert torch.equal(rest, whole[16:])


class Failing(Augmented):
    """Some samples can't be read, by chance."""

    def __getitem__(self, index):
        if index == 30 and random.random() < 0.5:
            raise ValueError("by chance")
        return torch.tensor([float(index)])


def outcome(key, size):
    try:
        read(DataLoader(Failing(), size), 1, key)
    except ValueError:
        return "failed"
    return "read"


def test_a_sample_fails_by_its_own_chance():
    outcomes = [{outcome(key, size) for size in (1, 8, 16)} for key in range(8)]
    assert all(len(each) == 1 for each in outcomes)
    assert set.union(*outcomes) == {"failed", "read"}


class ByName(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, name):
        return torch.stack([torch.tensor(float(len(str(name)))), torch.rand(())])


class Nameless:
    pass


def test_any_index_with_a_name_has_numbers_of_its_own():
    names = ["a", ("b", 1), np.int64(3), torch.tensor(4)]
    one, other = (
        read(DataLoader(ByName(), size, sampler=names, num_workers=workers), 1)[0]
        for size, workers in ((1, 0), (3, 1))
    )
    assert torch.equal(one, other)
    assert len(one[:, 1].unique()) == 4
    with pytest.raises(ArgumentTypeError, match="Nameless"):
        read(DataLoader(ByName(), 1, sampler=[Nameless()]), 1)


class Several(Augmented):
    """Gives whole batches by lists of indices."""

    def __getitem__(self, indices):
        return torch.tensor([[float(index), np.random.rand()] for index in indices])


def test_a_data_set_that_is_given_lists_of_indices_still_is():
    def loader(**options):
        return DataLoader(Several(), None, sampler=[[0, 1, 2], [5, 6, 7]], **options)

    whole = read(loader())
    assert torch.equal(read(loader(num_workers=1)), whole)
    assert len(whole[:, :, 1].unique()) == 12


def makes_generators(worker):
    info = get_worker_info()
    assert type(info.dataset) is WithOwn
    info.dataset.new = np.random.default_rng(worker)
    np.random.seed(worker)


def test_what_a_workers_beginning_seeds_decides_nothing():
    loader = DataLoader(WithOwn(), 8, num_workers=2, worker_init_fn=makes_generators)
    assert torch.equal(read(loader), read(DataLoader(WithOwn(), 8)))


class Pair(Dataset):
    """An image and its mask, moved alike by generators with one seed; a third has another."""

    def __init__(self):
        self.of_image, self.of_mask = np.random.default_rng(4), np.random.default_rng(4)
        self.other = np.random.default_rng(5)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        numbers = self.of_image, self.of_mask, self.other
        return torch.tensor([float(index), *(each.normal() for each in numbers)])


def test_generators_with_one_seed_stay_alike():
    rows = read(DataLoader(Pair(), 4, num_workers=1), 1)[0]
    assert torch.equal(rows[:, 1], rows[:, 2])
    assert not torch.isclose(rows[:, 1], rows[:, 3]).any()


class Step:
    """A transform that has a generator."""

    def __init__(self, seed=4):
        self.random = random.Random(seed)

    def __call__(self):
        return self.random.random()


class Other(Step):
    """Another one."""


class Pipelines(Pair):
    """One seed for all steps of an image's transforms, and for those of its mask."""

    def __init__(self):
        self.of_image, self.of_mask = [Step(), Other(), Step(5)], [Other()]

    def __getitem__(self, index):
        return torch.tensor([step() for step in (*self.of_image, *self.of_mask)])


def test_the_steps_of_a_pipeline_with_one_seed_draw_apart():
    step, other, seeded_apart, of_mask = read(DataLoader(Pipelines(), 8), 1)[0].T
    assert torch.equal(other, of_mask)
    assert len(torch.cat([step, other, seeded_apart]).unique()) == 24


def test_the_seed_of_a_sample_is_drawn_outside_of_data():
    torch.manual_seed(0)
    outside = [fitkit.data.sample_seed() for _ in range(2)]
    assert outside[0] != outside[1]
    list(make_source(DataLoader(WithOwn(), 8)).batches(0))
    torch.manual_seed(0)
    assert [fitkit.data.sample_seed() for _ in range(2)] == outside


def test_data_that_draw_nothing_are_left_alone_after_a_processs_first_batch():
    class Seen(Augmented):
        def __getitem__(self, index):
            return torch.get_rng_state()

    seeded = Seeded(Seen(), list, None, by_batch=True)
    outside = torch.get_rng_state()
    first, second = (seeded.__getitems__(Keys(1, 0, n, [n, n + 1])) for n in range(2))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(second[0], second[1])
    assert torch.equal(second[0], outside)


def test_seeds_passes_samples_and_repeats_draw_independent_numbers():
    """Of 4 x 4,000 draws of each library: means, frequencies, and how they go together."""
    count = 4000
    seeded = Seeded(Augmented(), list, None, by_batch=True)
    numbers = (lambda: torch.rand(()).item()), np.random.rand, random.random
    seeded.dataset.columns = lambda index: (draw() for draw in numbers)
    tables = []
    for key, number in ((1, 0), (1, 1), (2, 0), (1 << 40, 0)):
        rows = seeded.__getitems__(Keys(key, number, 0, range(count)))
        tables.append(torch.stack([x[1:] for x, _ in rows]).double())
    columns = torch.cat(tables, 1).T  # (12, 4000)
    assert ((columns.mean(1) - 0.5).abs() < 4 * (1 / 12 / count) ** 0.5).all()
    for column in columns:
        frequencies = torch.histc(column, 50, 0, 1)
        assert 20 < ((frequencies - count / 50) ** 2 / (count / 50)).sum() < 95  # 49 ± 10
    together = torch.corrcoef(columns) - torch.eye(12)
    assert together.abs().max() < 4.5 / count**0.5
    neighbours = [torch.corrcoef(torch.stack([c[:-1], c[1:]]))[0, 1] for c in columns]
    assert max(map(abs, neighbours)) < 4.5 / count**0.5
