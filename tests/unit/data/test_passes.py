"""What a pass over a loader promises, wherever it is read: its numbers, its epoch, all its data."""

import itertools
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    default_collate,
)

import fitkit
from fitkit.data import CombinedLoader
from fitkit.data.batches import NoRows
from fitkit.data.sources import make_source
from fitkit.extras.data_on_ranks.sharding import sharded
from tests.nets import linear
from tests.unit.extras.data_on_ranks.test_sharding import on_forked_ranks, on_ranks

SAMPLES = 12


class Drawn(Dataset):
    """Draws all numbers of its samples, from each library."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        drawn = torch.rand(()).item(), np.random.rand(), random.random()
        return torch.tensor(drawn, dtype=torch.float64)


class DrawnStream(IterableDataset):
    shards_itself = True

    def __iter__(self):
        return (Drawn()[0] for _ in range(SAMPLES // 2))


def drawn(dataset=None, **options):
    return DataLoader(dataset or Drawn(), 2, num_workers=1, **options)


def own():
    return torch.Generator().manual_seed(3)


def taken_by(exchange):
    return DistributedSampler(Drawn(), exchange.world_size, exchange.rank)


DRAWING = {
    "plain": lambda exchange: drawn(),
    "shuffled": lambda exchange: drawn(shuffle=True),
    "own generator": lambda exchange: drawn(shuffle=True, generator=own()),
    "living workers": lambda exchange: drawn(persistent_workers=True, generator=own()),
    "own collate": lambda exchange: drawn(collate_fn=lambda found: default_collate(found)),
    "combined": lambda exchange: CombinedLoader([drawn(), drawn(generator=own())]),
    "own parts": lambda exchange: drawn(sampler=taken_by(exchange), generator=own()),
    "a stream's parts": lambda exchange: drawn(DrawnStream(), generator=own()),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_the_workers_of_each_rank_and_pass_draw_numbers_of_their_own(kind):
    training = list(DRAWING).index(kind) % 2 == 0  # or an evaluation

    def read(exchange):
        source = make_source(DRAWING[kind](exchange))
        shard = sharded(source, exchange, training=training, replace_sampler=True, scatter=True)
        found = []
        for number in range(2):
            for batch in shard.batches(number):
                found += [row for part in batch.data for row in part.view(-1, 3).tolist()]
        return found

    rows = list(itertools.chain.from_iterable(on_forked_ranks(2, read)))
    parts = 2 if kind == "combined" else 1
    assert len(rows) == 2 * SAMPLES * parts
    for library in zip(*rows, strict=True):
        assert len(set(library)) == len(rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: drawn(shuffle=True),
        lambda: drawn(generator=own()),
        lambda: CombinedLoader([drawn(shuffle=True), drawn(generator=own())]),
    ],
)
def test_one_process_draws_its_orders_as_plain_loops_do(make, monkeypatch):
    monkeypatch.setattr(Drawn, "__getitem__", lambda _, index: torch.tensor(index))

    def plainly(data):
        return list(zip(*data.loaders, strict=True) if isinstance(data, CombinedLoader) else data)

    torch.manual_seed(0)
    data = make()
    expected = [plainly(data) for _ in range(2)], torch.get_rng_state()
    torch.manual_seed(0)
    source = make_source(make())
    found = [list(source.batches(number)) for number in range(2)], torch.get_rng_state()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Numbers(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Twice(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


class Endless:
    def __iter__(self):
        return (index % 13 for index in itertools.count())


class Lying(list):
    """Promises fewer entries than it gives."""

    def __len__(self):
        return 5


class Loose:
    """A loader that isn't torch's."""

    def __iter__(self):
        return iter([torch.arange(3.0), torch.arange(5.0), torch.arange(2.0)])


def without_some(samples):
    """Leaves out samples, whole batches too, as filters of broken files do."""
    kept = [sample for sample in samples if sample % 4 and not 4 <= sample < 8]
    return default_collate(kept) if kept else None


def numbers(**options):
    return DataLoader(Numbers(), **{"batch_size": 2, **options})


UNEVEN = {
    "own iteration": lambda: Twice(Numbers(), 2),
    "samples left out": lambda: numbers(collate_fn=without_some),
    "samples left out by workers": lambda: numbers(collate_fn=without_some, num_workers=1),
    "an endless sampler": lambda: numbers(sampler=Endless()),
    "a length that is too short": lambda: numbers(sampler=Lying(range(13))),
    "batches of a sampler": lambda: numbers(
        batch_size=1, batch_sampler=BatchSampler(SequentialSampler(Numbers()), 3, False)
    ),
    "whole batches": lambda: numbers(batch_size=None, sampler=[[0, 1], [2], [3, 4]]),
    "not torch's": lambda: Loose(),
    "combined with one that iterates by itself": lambda: CombinedLoader(
        [Twice(Numbers(), 2)], "min_size"
    ),
    "combined, a length that is too short": lambda: CombinedLoader(
        [numbers(sampler=Lying(range(13))), numbers()]
    ),
}


class ByLists(Numbers):
    def __getitem__(self, index):
        return torch.tensor(index, dtype=torch.float32)


def flat(batch):
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    return parts[0].flatten().tolist()


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", UNEVEN)
def test_ranks_get_what_the_loader_gives(kind, training, scatter):
    most = 10 if kind == "an endless sampler" else 100
    make = UNEVEN[kind]
    if kind == "whole batches":
        make = lambda: DataLoader(ByLists(), batch_size=None, sampler=[[0, 1], [2], [3, 4]])  # noqa: E731
    given = [flat(batch) for batch in itertools.islice(make(), most) if batch is not None]

    def read(exchange):
        shard = sharded(
            make_source(make()), exchange, training=training, replace_sampler=True,
            scatter=scatter, steps=most,
        )  # fmt: skip
        found = []
        for batch in itertools.islice(shard.batches(0), most // 2):
            found.append([] if batch is NoRows else flat(batch.data)[: batch.samples])
        return found

    run = on_forked_ranks if kind.endswith("workers") else on_ranks
    in_turn = itertools.zip_longest(*run(2, read), fillvalue=[])
    found = [value for step in in_turn for part in step for value in part]
    assert found == list(itertools.chain.from_iterable(given))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_an_endless_sampler_is_read_as_far_as_an_epoch_needs(training):
    def read(exchange):
        drawn = []
        endless = (drawn.append(index) or index % 13 for index in itertools.count())
        source = make_source(numbers(sampler=endless))
        shard = sharded(
            source, exchange, training=training, replace_sampler=True, scatter=True, steps=6
        )
        counts, batches = [], shard.batches(0)
        for _ in range(2 if training else 1):
            assert len(list(itertools.islice(batches, 3))) == 3
            counts.append(len(drawn))
        return counts

    first, other = on_ranks(2, read)
    epochs = 2 if training else 1
    assert other == [0] * epochs
    # Two ranks read three batches of two indices each in an epoch, and one batch ahead.
    assert first == [(6 * epoch + 1) * 2 for epoch in range(1, epochs + 1)]


def test_a_sampler_with_the_part_of_another_rank_is_refused():
    def read(exchange):
        sampler = BatchSampler(DistributedSampler(Numbers(), 2, 0, shuffle=False), 2, False)
        source = make_source(DataLoader(Numbers(), batch_sampler=sampler))
        return sharded(source, exchange, training=True, replace_sampler=True, scatter=True)

    with pytest.raises(fitkit.ConfigurationError, match="rank 1 of 2 the data of rank 0 of 2"):
        on_ranks(2, read)


class Told:
    """Notes the epochs that it was told."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class ToldSampler(Told):
    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4


class ToldRows(Told, Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(self.epochs[-1]))


class ToldStream(Told, IterableDataset):
    def __iter__(self):
        return iter([torch.tensor(float(self.epochs[-1]))] * 4)


class ToldLoader(Told):
    def __iter__(self):
        return iter([torch.ones(2)] * 2)


def loader(dataset, **options):
    return DataLoader(dataset, 2, **options)


PLACES = {
    "sampler": (ToldSampler, lambda told: loader(Numbers(), sampler=told)),
    "batch sampler": (
        ToldSampler,
        lambda told: DataLoader(Numbers(), batch_sampler=BatchSampler(told, 2, False)),
    ),
    "rows": (ToldRows, loader),
    "rows in parts": (ToldRows, lambda told: loader(ConcatDataset([Subset(told, [0, 1, 2])]))),
    "stream": (ToldStream, loader),
    "stream in a chain": (ToldStream, lambda told: loader(ChainDataset([told]))),
    "combined": (ToldRows, lambda told: CombinedLoader({"a": loader(told)})),
    "combined streams": (ToldStream, lambda told: CombinedLoader([loader(told), [1] * 9])),
    "not torch's": (ToldLoader, lambda told: told),
}


@pytest.mark.parametrize("place", PLACES)
def test_whatever_takes_an_epoch_is_told_it_before_each_pass(place):
    kind, holder = PLACES[place]
    told = kind()
    source = make_source(holder(told))
    for number, skip in ((0, 0), (1, 0), (4, 1)):
        assert len(list(source.batches(number, skip))) == 2 - skip
    assert told.epochs == [0, 1, 4]

    def read(exchange):
        told = kind()
        source = make_source(holder(told))
        shard = sharded(source, exchange, training=True, replace_sampler=True, scatter=False)
        list(shard.batches(3))
        return told.epochs

    # An index sampler is only asked on rank 0, but told everywhere.
    assert on_ranks(2, read) == [[3], [3]]


@pytest.mark.parametrize("kind", [ToldRows, ToldStream])
@pytest.mark.parametrize("combined", [False, True])
def test_living_workers_read_the_epoch_that_was_told(kind, combined):
    made = loader(kind(), num_workers=1, persistent_workers=True)
    source = make_source(CombinedLoader([made]) if combined else made)
    for number in (0, 1, 1, 4):
        rows = [batch[0] if combined else batch for batch in source.batches(number)]
        assert torch.cat(rows).tolist() == [number] * 4


def test_living_workers_live_on_where_the_epoch_changes_nothing():
    class Worker(Numbers):
        def __getitem__(self, index):
            return torch.tensor(os.getpid())

    made = loader(Worker(), num_workers=1, persistent_workers=True)
    workers = set()
    for number in range(3):  # a call has a source of its own
        for batch in make_source(made).batches(number):
            workers.update(batch.tolist())
    assert len(workers) == 1


@pytest.mark.parametrize("combined", [False, True])
def test_passes_over_one_loader_may_overlap(combined):
    made = loader(Numbers(), num_workers=1, persistent_workers=True)
    source = make_source(CombinedLoader([made, [None] * 9]) if combined else made)
    outer = source.batches(0)
    found = [next(outer) for _ in range(2)]
    inner = list(source.batches(0))
    found += outer
    rows = [torch.cat([b[0] if combined else b for b in each]) for each in (found, inner)]
    assert [each.tolist() for each in rows] == [list(range(13))] * 2


def test_a_validation_within_the_epoch_may_read_the_same_loader():
    rows = [(torch.ones(4), torch.ones(1))] * 16
    both = DataLoader(rows, 2, num_workers=1, persistent_workers=True)
    model = fitkit.Model(linear(4, 1))
    model.compile("sgd", "mse")
    model.fit(both, validation_data=both, validation_freq=0.5, verbose=0)
    assert model.global_step == 8
