"""Kinds of entries in batches: each in every verb, and none asked for by name in the core."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import fitkit
from fitkit import ConfigurationError, trees
from fitkit.data.batches import is_empty
from fitkit.data.to_device import Transfer
from fitkit.extras.rows import split
from fitkit.samples import samples_of
from fitkit.seams.batches import KINDS, BatchKind, kind_of

ROWS = [torch.rand(size, 3, generator=torch.Generator().manual_seed(size)) for size in (2, 1, 4)]


class Bags:
    """Rows of several bags, one after another."""

    def __init__(self, rows, sizes):
        self.rows, self.sizes = rows, sizes


class OfBags(BatchKind):
    words = "a batch of bags"

    def count(self, entry):
        return len(entry.sizes)

    def move(self, entry, device, dtype):
        return Bags(entry.rows.to(device, dtype), entry.sizes)

    def rows(self, entry, start, stop):
        parts = entry.rows.split(entry.sizes)[start:stop]
        return Bags(torch.cat(parts), entry.sizes[start:stop])

    def join(self, entries):
        sizes = [size for entry in entries for size in entry.sizes]
        return Bags(torch.cat([entry.rows for entry in entries]), sizes)


KINDS.add(f"{__name__}.Bags", OfBags())


def means(rows):
    return torch.stack([one.mean(0) for one in rows])


def dense(entry):
    return list(entry.to_dense())


def unbound(entry):
    return entry.unbind()


MADE = {
    "bags": (lambda r: Bags(torch.cat(r), [*map(len, r)]), lambda e: e.rows.split(e.sizes)),
    "packed": (lambda r: pack_sequence(r, enforce_sorted=False), unpack_sequence),
    "nested": (torch.nested.nested_tensor, unbound),
    "jagged": (lambda r: torch.nested.nested_tensor(r, layout=torch.jagged), unbound),
    "sparse": (lambda r: means(r).to_sparse(), dense),
    "compressed": (lambda r: means(r).to_sparse_csr(), dense),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR"
)


class Means(nn.Module):
    """Each sample's mean row, through a linear layer."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(3, 1), read

    def forward(self, entry):
        rows = [one.reshape(-1, 3).mean(0) for one in self.read(entry)]
        return self.linear(torch.stack(rows))


def trained(batches, read):
    model = fitkit.Model(Means(read))
    for one in model.parameters():
        nn.init.constant_(one, 0.5)
    model.compile("sgd", "mse", learning_rate=0.1, accelerator="cpu", accumulate_grad_batches=2)
    model.fit(batches, verbose=0)
    return model


@pytest.mark.parametrize("kind", MADE)
def test_samples_are_counted_and_parts_weighed_by_them(kind):
    make, read = MADE[kind]
    targets = torch.tensor([[1.0], [2.0], [4.0]])
    cuts = [(ROWS[:2], targets[:2]), (ROWS[2:], targets[2:])]
    batches = [(make(rows), y) for rows, y in cuts]
    assert [samples_of(batch) for batch in batches] == [2, 1]
    assert [samples_of(make(rows)) for rows, _ in cuts] == [2, 1]
    assert kind_of(batches[0][0]) is not None
    assert not is_empty(batches[0])
    found = trained(batches, read)
    whole = means(ROWS)
    weight = torch.full((1, 3), 0.5, requires_grad=True)
    ((whole @ weight.T + 0.5 - targets) ** 2).mean().backward()
    expected = weight.detach() - 0.1 * weight.grad
    torch.testing.assert_close(found.net.linear.weight.detach(), expected)
    if kind != "compressed":
        outputs = found.predict((make(rows) for rows, _ in cuts), verbose=0)
        assert outputs.shape == (3, 1)


@pytest.mark.parametrize("kind", MADE)
def test_an_entry_moves_in_the_precision_of_the_net(kind):
    make, read = MADE[kind]
    entry = make([one.double() for one in ROWS])
    for is_lent in (False, True):
        (moved, _) = Transfer(torch.device("cpu"), torch.float32)(
            (entry, torch.zeros(3)), is_lent=is_lent
        )
        assert kind_of(moved) is kind_of(entry)
        assert {one.dtype for one in read(moved)} == {torch.float32}


def test_the_sizes_of_packed_sequences_stay_on_the_cpu():
    moved = Transfer(torch.device("meta"), torch.float32)(
        {"x": pack_sequence(ROWS, enforce_sorted=False)}, is_lent=True
    )["x"]
    assert moved.data.is_meta
    assert moved.batch_sizes.is_cpu


@pytest.mark.parametrize("kind", MADE)
def test_outputs_of_a_kind_are_joined_as_it_says(kind):
    make, read = MADE[kind]
    if kind == "compressed":
        pytest.skip("torch doesn't join compressed tensors")
    joined = trees.concatenate([make(ROWS[:2]), make(ROWS[2:])], [2, 1])
    for one, other in zip(read(joined), read(make(ROWS)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", MADE)
def test_samples_are_cut_apart_or_that_is_refused(kind):
    make, read = MADE[kind]
    entry = make(ROWS)
    if kind_of(entry).can_cut:
        parts = split((entry, torch.zeros(3)), 2, 3)
        assert [len(read(part)) for part, _ in parts] == [2, 1]
    else:
        with pytest.raises(ConfigurationError, match="can't be cut apart"):
            split((entry, torch.zeros(3)), 2, 3)


def test_the_core_asks_for_no_kind_by_name():
    core = Path(fitkit.__file__).parent
    folders = ("data", "losses", "metrics", "training", "callbacks")
    files = [path for name in folders for path in (core / name).rglob("*.py")]
    files += [core / "samples.py", core / "trees.py"]
    asks = re.compile(r"PackedSequence|torch\.(sparse_(coo|csr|csc|bsr|bsc)|jagged)\b")
    assert [path.name for path in files if asks.search(path.read_text())] == []
