"""Several workers that read one stream: said once where each sample comes from every worker."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

import fitkit
from fitkit.errors import warn_once

SAMPLES, BATCH, WORKERS = 12, 2, 2


class Numbers(IterableDataset):
    def sample(self, number):
        return torch.full((3,), float(number)), float(number)

    def __iter__(self):
        return map(self.sample, range(SAMPLES))


class Texts(Numbers):
    def sample(self, number):
        return {"x": np.full(3, number, "float32"), "name": f"sample {number}"}


class Divided(Numbers):
    def __iter__(self):
        info = get_worker_info()
        return itertools.islice(super().__iter__(), info.id, None, info.num_workers)


class SetUp(Numbers):
    first = 0

    def __iter__(self):
        return map(self.sample, range(self.first, self.first + 8))


def set_up(number):
    get_worker_info().dataset.first = 8 * number


class Equal(Numbers):
    def sample(self, number):
        return super().sample(1)


class Random(Numbers):
    def sample(self, number):
        return torch.rand(3), 0.0


def hugging_face():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": np.arange(48.0).reshape(12, 4)}).with_format("torch")
    return rows.to_iterable_dataset(num_shards=2)


def loader(data, **options):
    return DataLoader(data, BATCH, num_workers=WORKERS, **options)


def warnings_of(read):
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read()
    return [one for one in found if "workers reads the whole" in str(one.message)]


def model():
    made = fitkit.Model(nn.Linear(3, 1))
    made.compile("sgd", "mse", accelerator="cpu", devices=1)
    return made


DOUBLED = {
    "plain": lambda: loader(Numbers()),
    "living workers": lambda: loader(Numbers(), persistent_workers=True),
    "of texts": lambda: loader(Texts()),
    "in a chain": lambda: loader(ChainDataset([Numbers(), Numbers()])),
}
RIGHT = {
    "divided": lambda: loader(Divided()),
    "divided by worker_init_fn": lambda: loader(SetUp(), worker_init_fn=set_up),
    "equal samples": lambda: loader(Equal()),
    "random samples": lambda: loader(Random()),
    "Hugging Face's": lambda: loader(hugging_face()),
    "one worker": lambda: DataLoader(Numbers(), BATCH, num_workers=1),
    "no worker": lambda: DataLoader(Numbers(), BATCH),
}


@pytest.mark.parametrize("kind", [*DOUBLED, *RIGHT])
def test_a_stream_that_each_worker_reads_is_told_from_all_others(kind):
    data = {**DOUBLED, **RIGHT}[kind]()
    source = fitkit.data.sources.make_source(data)
    found = warnings_of(lambda: [list(source.batches(number)) for number in range(2)])
    assert len(found) == (kind in DOUBLED)
    plain = [x for batch in data for x in (batch[0] if isinstance(batch, list) else batch["x"])]
    ours = list(source.batches(2))
    ours = [x for batch in ours for x in (batch[0] if isinstance(batch, list) else batch["x"])]
    if kind != "random samples":
        assert torch.equal(torch.stack(ours), torch.stack(plain))


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_each_verb_says_so_and_each_advice_ends_it(verb):
    advised = loader(Divided()), DataLoader(Numbers(), BATCH, num_workers=1)
    told = [
        len(warnings_of(functools.partial(getattr(model(), verb), data, verbose=0)))
        for data in (loader(Numbers()), *advised)
    ]
    assert told == [1, 0, 0]
