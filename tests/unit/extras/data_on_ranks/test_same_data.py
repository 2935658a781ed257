"""Data that differ between ranks which each run the script are refused on every rank."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import fitkit
from fitkit.data.sources import make_source
from fitkit.extras.data_on_ranks.same_data import check_same_on_all_ranks


class Ranks:
    """What a rank hears where each of several ranks has its own source."""

    rank = 0

    def __init__(self, sources):
        self.sources, self.facts = sources, []

    def gather(self, facts):
        if len(self.facts) < len(self.sources):
            self.facts.append(facts)
        return self.facts


def compare(*data):
    sources = [make_source(*parts) for parts in data]
    ranks = Ranks(sources)
    for source in sources:
        check_same_on_all_ranks(source, ranks)


def rows(seed, count=1000, **options):
    return torch.randn(count, 5, 7, generator=torch.Generator().manual_seed(seed)), torch.zeros(
        count, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.uint8])
def test_equal_data_pass_in_any_form(dtype):
    x, y = rows(0)
    compare((x.to(dtype), y), (x.to(dtype).clone(), y.clone()))
    compare((x.transpose(1, 2), y), (x.transpose(1, 2).contiguous(), y))
    compare(({"a": x, "b": (x[:, 0],)}, y), ({"a": x, "b": (x[:, 0],)}, y))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (rows(1), r"x \(1000, 5, 7\) float32 holds other numbers on rank 1 than on rank 0"),
        (rows(0, 999), r"rank 0 has x \(1000, 5, 7\) float32, rank 1 has x \(999, 5, 7\) float32"),
        (rows(0)[:1], r"rank 0 has y \(1000,\) float32, rank 1 has nothing"),
    ],
    ids=["numbers", "samples", "parts"],
)
def test_what_differs_is_named(other, words):
    with pytest.raises(fitkit.ConfigurationError, match=words):
        compare(rows(0), other)


def test_an_unseeded_split_is_noticed():
    class Whole(TensorDataset):
        pass

    whole = Whole(*rows(0))
    split = [Subset(whole, torch.randperm(1000)[:500].tolist()) for _ in range(2)]
    compare((DataLoader(split[0]),), (DataLoader(split[0]),))
    with pytest.raises(fitkit.ConfigurationError, match="indices holds other numbers"):
        compare((DataLoader(split[0]),), (DataLoader(split[1]),))
