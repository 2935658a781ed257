"""Shares of several ranks, with threads in place of processes."""

import itertools
import multiprocessing
import os
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fitkit.data.batches import Batch, NoRows
from fitkit.data.sources import for_other_ranks, make_source
from fitkit.errors import ConfigurationError
from fitkit.extras.data_on_ranks.sharding import sharded


class Exchange:
    """The collectives of a rank, all by `gather(value)`: what each rank said."""

    def __init__(self, rank, world_size, gather):
        self.rank, self.world_size, self.gather = rank, world_size, gather

    def sums(self, numbers):
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def broadcast(self, value):
        return self.gather(value)[0]

    def scatter(self, values):
        return self.gather(values)[0][self.rank]


def on_ranks(size, function):
    """What `function(exchange)` gives on each of `size` ranks, which are threads.

    They run by turns, and change in exchanges alone: unlike processes they share their random
    numbers, and to a reader of samples those that another thread draws are the sample's.
    """
    barrier, said = threading.Barrier(size, timeout=10), [None] * size
    results, errors, turn = [None] * size, [], threading.Lock()

    def wait():
        turn.release()
        try:
            barrier.wait()
        finally:
            turn.acquire()

    def run(rank):
        def gather(value):
            said[rank] = value
            wait()
            found = list(said)
            wait()
            return found

        with turn:
            try:
                results[rank] = function(Exchange(rank, size, gather))
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    return results


def on_forked_ranks(size, function):
    """The same with processes, for loaders whose workers are forked: threads shouldn't fork."""
    context = multiprocessing.get_context("fork")

    def run(rank, parent):
        def gather(value):
            parent.send((False, value))
            return parent.recv()

        parent.send((True, function(Exchange(rank, size, gather))))

    ends = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        context.Process(target=run, args=(rank, theirs)).start()
        theirs.close()
        ends.append(ours)
    while True:
        assert all(end.poll(60) for end in ends)
        heard = [end.recv() for end in ends]  # EOFError where one has failed: see its output
        if all(is_result for is_result, _ in heard):
            return [value for _, value in heard]
        for end in ends:
            end.send([value for _, value in heard])


def shares(data, size, *, training, scatter=False, batch_size=4, keep=object):
    def read(exchange):
        source = data(exchange) if callable(data) else data
        source = make_source(source, batch_size=batch_size)
        shard = sharded(source, exchange, training=training, replace_sampler=True, scatter=scatter)
        found = [one for one in shard.batches(0) if isinstance(one, keep)]
        return [
            one
            if one is NoRows
            else (one.data[0].tolist(), one.samples, one.total)
            if training
            else one.data[0].tolist()
            for one in found
        ]

    return on_ranks(size, read)


X = torch.arange(11.0)

KINDS = {
    "arrays": lambda exchange: X,
    "loader": lambda exchange: DataLoader(TensorDataset(X), batch_size=4),
    "list": lambda exchange: [(part,) for part in X.split(4)],
    "scattered": lambda exchange: (
        ((part,) for part in X.split(4)) if exchange.rank == 0 else iter(())
    ),
}


@pytest.mark.filterwarnings("ignore:batch_size=4 is not used")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_in_training_all_ranks_make_equal_steps_over_each_sample_once(kind, size):
    found = shares(KINDS[kind], size, training=True, scatter=kind == "scattered")
    assert len({len(steps) for steps in found}) == 1
    for step in zip(*found, strict=True):
        assert sum(count for _, count, _ in step) == step[0][2]
        assert len({total for _, _, total in step}) == 1
    counted = [value for steps in found for values, count, _ in steps for value in values[:count]]
    assert sorted(counted) == X.tolist()


def emptied(exchange, kind, lengths):
    """Batches of these lengths, by one of the ways in which ranks come to theirs."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    batches = [(torch.arange(a, b).float(),) for a, b in itertools.pairwise(ends)]
    if kind == "list":
        return batches
    if kind == "scattered":
        return (batch for batch in batches) if exchange.rank == 0 else iter(())
    return DataLoader(
        range(len(batches)), batch_size=1, collate_fn=lambda chosen: batches[chosen[0]]
    )


@pytest.mark.filterwarnings("ignore:batch_size=4 is not used")
@pytest.mark.parametrize("lengths", [[0, 2, 3, 4], [2, 0, 0, 4], [3, 2, 0, 0], [0, 2, 0, 0, 0]])
@pytest.mark.parametrize("kind", ["list", "scattered"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_whose_batch_is_empty_repeats_one_that_counts_for_nothing(kind, lengths, size):
    found = shares(
        lambda exchange: emptied(exchange, kind, lengths), size, training=True,
        scatter=kind == "scattered", keep=Batch,
    )  # fmt: skip
    assert len({len(steps) for steps in found}) == 1
    for step in zip(*found, strict=True):
        assert sum(count for _, count, _ in step) == step[0][2] > 0
        assert all(values for values, _, _ in step)
    counted = [value for steps in found for values, count, _ in steps for value in values[:count]]
    assert sorted(counted) == list(range(sum(lengths)))


@pytest.mark.filterwarnings("ignore:batch_size=4 is not used")
def test_a_rank_whose_collate_gave_nothing_repeats_one_that_counts_for_nothing():
    found = shares(
        lambda exchange: emptied(exchange, "loader", [0, 2, 3, 0]), 2, training=True, keep=Batch
    )
    # Counted by their rows, as in one process, and not by the sampler's indices.
    assert found == [[([0, 1], 0, 2), ([2, 3, 4], 3, 3)], [([0, 1], 2, 2), ([0, 1], 0, 3)]]


@pytest.mark.filterwarnings("ignore:batch_size=4 is not used")
def test_no_rank_ends_at_a_step_in_which_all_batches_are_empty():
    for kind in ("list", "scattered"):
        found = shares(
            lambda exchange, kind=kind: emptied(exchange, kind, [1, 1, 0, 0, 1, 1]), 2,
            training=True, scatter=kind == "scattered", keep=object,
        )  # fmt: skip
        assert [[step is NoRows for step in steps] for steps in found] == [[False, True, False]] * 2


@pytest.mark.filterwarnings("ignore:batch_size=4 is not used")
@pytest.mark.parametrize("kind", ["list", "scattered", "loader"])
def test_in_evaluation_an_empty_batch_keeps_its_place_among_the_ranks(kind):
    one, other = shares(
        lambda exchange: emptied(exchange, kind, [2, 0, 0, 1, 1]), 2, training=False,
        scatter=kind == "scattered", keep=object,
    )  # fmt: skip
    assert one[:3] == [[0, 1], NoRows, [3]]
    assert other[:2] == [NoRows, [2]]


@pytest.mark.filterwarnings("ignore:batch_size=4 is not used")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_in_evaluation_the_batches_of_one_process_are_dealt_out_in_turn(kind, size):
    found = shares(KINDS[kind], size, training=False, scatter=kind == "scattered")
    whole = [None] * sum(map(len, found))
    for rank, part in enumerate(found):
        whole[rank::size] = part
    assert whole == [part.tolist() for part in X.split(4)]


def test_a_last_step_that_is_not_full_is_dealt_out_evenly():
    assert shares(lambda exchange: X, 2, training=True) == [
        [([0, 1, 2, 3], 4, 8), ([8], 1, 3)],
        [([4, 5, 6, 7], 4, 8), ([9, 10], 2, 3)],
    ]


def test_a_rank_without_samples_repeats_one_that_counts_for_nothing():
    found = shares(lambda exchange: X[:9], 2, training=True)
    assert found[0][-1] == ([8], 0, 1)
    assert found[1][-1] == ([8], 1, 1)


def test_drop_last_leaves_out_a_step_that_is_not_full():
    loader = lambda exchange: DataLoader(TensorDataset(X), batch_size=4, drop_last=True)  # noqa: E731
    counts = [[count for _, count, _ in steps] for steps in shares(loader, 2, training=True)]
    assert counts == [[4], [4]]
    assert shares(loader, 3, training=True) == [[], [], []]


def test_a_stream_with_other_lengths_on_each_rank_ends_together():
    class Own(torch.utils.data.IterableDataset):
        shards_itself = True

        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return iter([(torch.tensor([float(i)]),) for i in range(self.count)])

    found = shares(
        lambda exchange: DataLoader(Own(4 + 8 * exchange.rank), batch_size=4), 2, training=True
    )
    assert [[(count, total) for _, count, total in steps] for steps in found] == [
        [(4, 8), (0, 4), (0, 4)],
        [(4, 8), (4, 4), (4, 4)],
    ]


class StreamingDataset(torch.utils.data.IterableDataset):
    """Divides itself as MosaicML's does, by the launcher's variables."""

    next_epoch = 0

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        first, step = (self.rank, 2) if os.environ.get("WORLD_SIZE") == "2" else (0, 1)
        return iter([(each,) for each in X[first::step]])


StreamingDataset.__module__ = "streaming.base.dataset"


class WebDataset(torch.utils.data.IterableDataset):
    """Divides its files as WebDataset does with `nodesplitter=split_by_node`."""

    def __init__(self, rank):
        def split_by_node(files):
            return files[rank::2]

        split_by_node.__module__ = "webdataset.shardlists"
        self.pipeline = [list(range(4)), split_by_node]

    def __iter__(self):
        return iter([(X[file],) for file in self.pipeline[1](self.pipeline[0])])


@pytest.mark.parametrize("training", [True, False])
def test_streams_that_libraries_divide_are_not_divided_again(monkeypatch, training):
    def read(stream):
        found = shares(lambda exchange: stream(exchange.rank), 2, training=training)
        if training:
            found = [[rows for rows, count, _ in steps if count] for steps in found]
        return [sum(steps, []) for steps in found]

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read(StreamingDataset) == [X[::2].tolist(), X[1::2].tolist()]
    assert read(WebDataset) == [[0, 2], [1, 3]]
    monkeypatch.delenv("WORLD_SIZE")  # every rank reads all, and keeps its batches
    assert read(StreamingDataset) == [[0, 1, 2, 3, 8, 9, 10], [4, 5, 6, 7]]


def test_what_hugging_face_divides_is_checked():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"x": range(8)}).to_iterable_dataset(num_shards=2)

    def read(rank_of):
        def on_rank(exchange):
            part = split_dataset_by_node(whole, rank_of(exchange.rank), 2)
            source = make_source(part, batch_size=2)
            shard = sharded(source, exchange, training=False, replace_sampler=True, scatter=False)
            return [batch.data["x"].tolist() for batch in shard.batches(0)]

        return on_ranks(2, on_rank)

    assert read(lambda rank: rank) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(ConfigurationError, match="rank 1 of 2 the data of rank 0 of 2"):
        read(lambda rank: 0)


def test_samples_are_counted_by_their_targets_on_every_rank():
    rows = [({"table": torch.zeros(7, 1), "x": part}, part) for part in X.split(4)]

    def read(exchange):
        source = make_source(rows)
        source = source if exchange.rank == 0 else for_other_ranks(source)
        shard = sharded(source, exchange, training=True, replace_sampler=True, scatter=True)
        return [(share.samples, share.total) for share in shard.batches(0)]

    assert on_ranks(2, read) == [[(4, 8), (3, 3)], [(4, 8), (0, 3)]]
