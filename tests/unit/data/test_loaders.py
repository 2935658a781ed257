"""Loaders over tensors, read by index: all is as torch's own loader gives it."""

import functools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from fitkit.data import CombinedLoader
from fitkit.data.batches import Stream
from fitkit.data.loaders import reads_by_index
from fitkit.data.sources import make_source
from fitkit.progress import Progress

TENSORS = (
    torch.arange(66.0).reshape(22, 3),
    torch.arange(22),
    torch.arange(44, dtype=torch.float64).reshape(2, 22).t(),
    torch.arange(22) % 2 == 0,
)
PLAIN = TensorDataset(*TENSORS)


class EagerBatches:
    """A batch sampler that draws its order when it is asked for an iterator."""

    def __iter__(self):
        return iter(torch.randperm(22).view(11, 2).tolist())

    def __len__(self):
        return 11


class FromTheEnd(list):
    """Indices that count from the end, as a list allows."""


class Labelled:
    """Indices under labels of their own, as a pandas Series has them."""

    def __len__(self):
        return 3

    def __getitem__(self, label):
        return {0: 5, 1: 4, 2: 9}[label]

    def __array__(self, *arguments, **options):
        return np.array([9, 4, 5])


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * part for part in super().__getitem__(index))


class OwnLoader(DataLoader):
    pass


def sampled(sampler, **options):
    return DataLoader(PLAIN, batch_size=4, sampler=sampler, **options)


def generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda: DataLoader(PLAIN, batch_size=4),
    "in order, none left out": lambda: DataLoader(PLAIN, batch_size=11),
    "shuffled": lambda: DataLoader(PLAIN, batch_size=4, shuffle=True),
    "shuffled, all full": lambda: DataLoader(PLAIN, batch_size=11, shuffle=True),
    "shuffled, last dropped": lambda: DataLoader(PLAIN, batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(PLAIN, batch_size=4, shuffle=True, generator=generator()),
    "own generator, all full": lambda: DataLoader(
        PLAIN, batch_size=11, shuffle=True, generator=generator()
    ),
    "the global generator": lambda: DataLoader(
        PLAIN, batch_size=11, shuffle=True, generator=torch.default_generator
    ),
    "more samples than there are": lambda: sampled(RandomSampler(PLAIN, num_samples=50)),
    "fewer": lambda: sampled(RandomSampler(PLAIN, num_samples=7, generator=generator())),
    "with replacement": lambda: sampled(RandomSampler(PLAIN, replacement=True, num_samples=40)),
    "weighted": lambda: sampled(WeightedRandomSampler([1.0] * 22, 30)),
    "some": lambda: sampled(SubsetRandomSampler([1, 2, 3, 9, 11])),
    "from the end": lambda: sampled(FromTheEnd([-1, 3, -22])),
    "tensors as indices": lambda: sampled(SubsetRandomSampler(torch.arange(9))),
    "own batches": lambda: DataLoader(PLAIN, batch_sampler=[[3, 1], [2], [21, 0, 5]]),
    "batches drawn at once": lambda: DataLoader(PLAIN, batch_sampler=EagerBatches()),
    "batches of batches": lambda: DataLoader(
        PLAIN, batch_sampler=BatchSampler(SubsetRandomSampler(range(10)), 4, True)
    ),
    "a subset": lambda: DataLoader(Subset(PLAIN, [5, 3, 8, 8, 0]), batch_size=2, shuffle=True),
    "a range": lambda: DataLoader(Subset(PLAIN, range(20, 2, -3)), batch_size=2, shuffle=True),
    "a part of a part": lambda: DataLoader(
        Subset(Subset(PLAIN, torch.tensor([5, 3, 8, 2])), [3, 0, 2]), batch_size=2
    ),
    "a subset from the end": lambda: DataLoader(Subset(PLAIN, [-1, -2, 4]), batch_size=2),
    "a subset by labels": lambda: DataLoader(Subset(PLAIN, Labelled()), batch_size=2),
    "small numbers as a mask": lambda: DataLoader(
        Subset(PLAIN, torch.tensor([1, 1], dtype=torch.uint8)), batch_size=2
    ),
    "batches of tensors": lambda: DataLoader(PLAIN, batch_sampler=torch.arange(22).view(11, 2)),
    "batches of tensors from the end": lambda: DataLoader(
        PLAIN, batch_sampler=[torch.tensor([3, -1]), torch.tensor([0])]
    ),
    "one tensor": lambda: DataLoader(TensorDataset(TENSORS[0]), batch_size=4),
}


def read(batches):
    """Batches, and the random state of torch after each of them."""
    found = []
    for batch in batches:
        assert type(batch) is list
        found.append((batch, torch.get_rng_state(), torch.rand(())))
    return found, torch.get_rng_state()


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("name", LOADERS)
def test_batches_order_and_draws_are_the_loaders_own_pass_after_pass(name):
    make = LOADERS[name]
    ours, torchs = make(), make()
    assert reads_by_index(ours)
    source = make_source(ours)
    torch.manual_seed(5)
    expected = [read(torchs) for _ in range(3)]
    torch.manual_seed(5)
    assert_same([read(source.batches(number)) for number in range(3)], expected)


@pytest.mark.parametrize("name", ["shuffled", "own generator", "weighted", "batches drawn at once"])
def test_a_pass_goes_on_where_it_was_cut_and_draws_as_if_it_had_not_been(name):
    torch.manual_seed(5)
    progress = Progress()
    stream, other = (Stream(make_source(LOADERS[name]()), progress) for _ in range(2))
    batches = stream.epoch()
    for _ in range(2):
        next(batches)
    progress.batches = 2
    state = torch.get_rng_state()
    expected = read(batches)
    torch.manual_seed(99)
    again = other.epoch(2)
    torch.set_rng_state(state)
    assert_same(read(again), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_others_may_have_changed_is_left_to_the_loader():
    def scaled(samples):
        return default_collate(samples)

    class Rows(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor([float(index)])

    learned = torch.nn.Parameter(torch.zeros(4, 1))
    for loader in (
        DataLoader(Doubled(*TENSORS)),
        DataLoader(Subset(Doubled(*TENSORS), [1])),
        OwnLoader(PLAIN),
        DataLoader(PLAIN, collate_fn=scaled),
        DataLoader(PLAIN, collate_fn=functools.partial(default_collate)),
        DataLoader(PLAIN, batch_size=None),
        DataLoader(PLAIN, num_workers=1),
        DataLoader(PLAIN, pin_memory=True),
        DataLoader(Rows()),
        DataLoader(TensorDataset(learned)),
        DataLoader(TensorDataset(torch.eye(4).to_sparse())),
        DataLoader(TensorDataset(torch.nested.nested_tensor([torch.ones(2)] * 4))),
    ):
        assert not reads_by_index(loader)


def test_changed_tensors_and_another_collate_function_are_seen_in_the_next_pass():
    x = torch.zeros(4, 1)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    source = make_source(loader)
    assert next(source.batches(0))[0].sum() == 0
    x.add_(1)
    (batch,) = source.batches(1)
    assert batch[0].sum() == 4
    batch[0].zero_()
    assert x.sum() == 4  # a batch has its own memory, as a collated one
    loader.collate_fn = lambda samples: [torch.tensor(len(samples))]
    assert next(source.batches(2)) == [torch.tensor(4)]


def test_an_index_that_is_not_there_is_an_index_error():
    for dataset in (PLAIN, Subset(PLAIN, [1, 2]), Subset(Subset(PLAIN, [1]), [0, 1])):
        source = make_source(DataLoader(dataset, batch_sampler=[[0], [22]]))
        with pytest.raises(IndexError):
            list(source.batches(0))


def test_a_stream_is_told_its_epoch():
    class Told(IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([torch.tensor(10.0 * self.epoch + i) for i in range(3)])

    class StreamingDataset(Told):
        """Counts as MosaicML's."""

        def __init__(self):
            self.next_epoch = 7

        set_epoch = None

        def __iter__(self):
            self.epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
            return super().__iter__()

    StreamingDataset.__module__ = "streaming.base.dataset"
    for stream in (Told(), StreamingDataset()):
        source = make_source(DataLoader(stream, batch_size=None))
        for number, skip in ((0, 0), (1, 0), (4, 1)):
            found = [float(each) for each in source.batches(number, skip)]
            assert found == [10.0 * number + i for i in range(skip, 3)]


def test_a_source_that_was_read_is_sent_and_reads_the_same_elsewhere():
    loaders = [DataLoader(list(range(10)), 2, shuffle=True) for _ in range(2)]
    for data in (loaders[0], CombinedLoader(loaders)):
        source = make_source(data)
        list(source.batches(0))
        other = pickle.loads(pickle.dumps(source))
        found = []
        for each in (source, other):
            torch.manual_seed(1)
            found.append(list(each.batches(1)))
        assert len(found[0]) == 5 and str(found[0]) == str(found[1])
