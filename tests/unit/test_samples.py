"""How many samples a batch has: each kind of batch, in each place where it is a weight."""

import collections
import dataclasses
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import fitkit
from fitkit import samples

Pair = collections.namedtuple("Pair", "x y")


class Graphs:
    """Graphs joined into one, as graph libraries make them."""

    def __init__(self, rows):
        self.nodes = torch.cat(rows)
        self.graph = torch.cat([torch.full((len(r),), i) for i, r in enumerate(rows)])
        self.num_graphs = len(rows)

    def to(self, device):
        return self


class Record(dict):
    """A dict with attributes."""


@dataclasses.dataclass
class TimeFirst:
    x: torch.Tensor
    lengths: torch.Tensor
    batch_size: int


@dataclasses.dataclass
class Joined:
    """Graphs joined into one, whose number is its length."""

    nodes: torch.Tensor
    graph: torch.Tensor
    y: torch.Tensor

    def __len__(self):
        return len(self.y)


class Images:
    """An object that is no container, with a length."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)


def boxes(rows):
    return [{"boxes": torch.zeros(len(row), 4)} for row in rows]


def lengths(rows):
    return torch.tensor([len(row) for row in rows])


def record(rows, **said):
    found = Record(x=pad_sequence(rows), lengths=lengths(rows))
    vars(found).update(said)
    return found


def means(rows):
    return torch.stack([row.mean(0) for row in rows])


def of_padded(batch):
    return batch["x"].sum(0) / batch["lengths"][:, None]


def of_graphs(batch):
    nodes = [batch.nodes[batch.graph == i] for i in range(int(batch.graph.max()) + 1)]
    return means(nodes)


def of_packed(batch):
    padded, sizes = pad_packed_sequence(batch["x"])
    return padded.sum(0) / sizes[:, None]


KINDS = {
    "rows": (lambda r: (means(r), lengths(r)), lambda b: b[0]),
    "a list of rows": (lambda r: [means(r), lengths(r)], lambda b: b[0]),
    "inputs and targets in lists": (
        lambda r: [[means(r), lengths(r)], [lengths(r), lengths(r)]], lambda b: b[0][0]
    ),
    "a named tuple": (lambda r: Pair(means(r), lengths(r)), lambda b: b.x),
    "detection": (lambda r: (r, boxes(r)), lambda b: means(b[0])),
    "detection in tuples": (lambda r: (tuple(r), tuple(boxes(r))), lambda b: means(b[0])),
    "targets first": (lambda r: {"targets": boxes(r), "x": r}, lambda b: means(b["x"])),
    "labels of dicts": (
        lambda r: {"pixels": means(r), "labels": boxes(r)}, lambda b: b["pixels"]
    ),
    "graphs": (Graphs, of_graphs),
    "graphs in a dict": (lambda r: {"g": Graphs(r), "y": r[0]}, lambda b: of_graphs(b["g"])),
    "a list of dicts": (
        lambda r: [{"x": row, "y": torch.tensor(1.0)} for row in r],
        lambda b: means([one["x"] for one in b]),
    ),
    "a list of pairs": (
        lambda r: [(row, 3) for row in r], lambda b: means([one[0] for one in b])
    ),
    "a list of objects": (
        lambda r: [types.SimpleNamespace(x=row) for row in r],
        lambda b: means([one.x for one in b]),
    ),
    "samples set on a dict": (lambda r: record(r, samples=len(r)), of_padded),
    "batch_size set on a dict": (lambda r: record(r, batch_size=torch.Size([len(r)])), of_padded),
    "batch_size in a dict": (lambda r: {**record(r), "batch_size": len(r)}, of_padded),
    "batch_size of a dataclass": (
        lambda r: TimeFirst(pad_sequence(r), lengths(r), len(r)), lambda b: of_padded(vars(b))
    ),
    "the length of a dataclass": (
        lambda r: Joined(Graphs(r).nodes, Graphs(r).graph, lengths(r)),
        lambda b: means([b.nodes[b.graph == i] for i in range(len(b))]),
    ),
    "point sets": (lambda r: (r, [torch.tensor(1.0) for _ in r]), lambda b: means(b[0])),
    "packed": (lambda r: {"x": pack_sequence(r, enforce_sorted=False)}, of_packed),
    "nested": (
        lambda r: {"x": torch.nested.nested_tensor(r)}, lambda b: means(b["x"].unbind())
    ),
    "jagged": (
        lambda r: {"x": torch.nested.nested_tensor(r, layout=torch.jagged)},
        lambda b: means(b["x"].unbind()),
    ),
    "texts and numbers": (
        lambda r: {"text": ["a" * len(row) for row in r], "y": [float(row.sum()) for row in r]},
        lambda b: torch.tensor(
            [[float(len(text)), y, 1.0] for text, y in zip(b["text"], b["y"], strict=True)]
        ) / 4,
    ),
    "an id, a scalar and a temperature first": (
        lambda r: {
            "id": 7, "scale": torch.tensor(2.0), "heat": torch.tensor([0.1]), "x": means(r)
        },
        lambda b: b["x"],
    ),
    "an object with a length": (lambda r: {"x": Images(r)}, lambda b: means(b["x"].rows)),
}  # fmt: skip
SIZES = (6, 1, 2, 3)
"""Uneven, and small enough to look like inputs and targets."""


def all_rows(count=12):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(4 if i % 2 else 1, 3, generator=generator) for i in range(count)]


def batches_of(make):
    rows, start, found = all_rows(), 0, []
    for size in SIZES:
        found.append(make(rows[start : start + size]))
        start += size
    return found


def features(name):
    """What the net gets, of each sample, as (12, 3)."""
    make, read = KINDS[name]
    return read(make(all_rows()))


class Squares(fitkit.Model):
    """The mean over samples of the squared sum of their three features."""

    def __init__(self, read):
        super().__init__(nn.Linear(3, 1, bias=False))
        nn.init.ones_(self.net.weight)
        self.read = read

    def loss(self, batch):
        loss = (self.net(self.read(batch)) ** 2).mean()
        self.log("logged", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        return self.loss(batch)


class OwnLoss(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.weight = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.weight.weight)
        self.read = read

    def forward(self, batch):
        return {"loss": (self.weight(self.read(batch["all"])) ** 2).mean()}


def compiled(model, **settings):
    model.compile("sgd", learning_rate=0.1, accelerator="cpu", devices=1, **settings)
    return model


def right(name):
    """The mean loss over all samples at weights of 1, and the weights after its update."""
    x = features(name).double()
    total = x.sum(1, keepdim=True)
    return float((total**2).mean()), 1 - 0.1 * (2 * total * x).mean(0)


@pytest.fixture(autouse=True)
def no_doubts():
    """No kind is in doubt."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*FK060.*")
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        yield


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 6, 12])
def test_each_kind_of_batch_has_its_samples(name, size):
    assert samples.samples_of(KINDS[name][0](all_rows()[:size])) == size


@pytest.mark.parametrize("name", KINDS)
def test_an_accumulated_update_and_the_epochs_means_are_those_of_all_samples(name):
    make, read = KINDS[name]
    model = compiled(Squares(read), accumulate_grad_batches=4)
    history = model.fit(iter(batches_of(make)), steps_per_epoch=4, shuffle=False, verbose=0)
    loss, weights = right(name)
    assert history["loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert history["logged"][-1] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(model.net.weight[0].double(), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_an_evaluation_is_that_of_all_samples(name):
    make, read = KINDS[name]
    found = compiled(Squares(read)).evaluate(iter(batches_of(make)), verbose=0, return_dict=True)
    assert found == pytest.approx({"loss": right(name)[0], "logged": right(name)[0]}, rel=1e-5)


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"texts and numbers"}))
def test_a_nets_own_loss_weighs_samples(name):
    make, read = KINDS[name]
    model = compiled(fitkit.Model(OwnLoss(read)), accumulate_grad_batches=4)
    batches = [{"all": batch} for batch in batches_of(make)]
    history = model.fit(iter(batches), steps_per_epoch=4, shuffle=False, verbose=0)
    loss, weights = right(name)
    assert history["loss"][-1] == pytest.approx(loss, rel=1e-5)
    found = model.net.weight.weight[0].double()
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
    assert compiled(fitkit.Model(OwnLoss(read))).evaluate(
        iter(batches), verbose=0
    ) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_loaders_collate_makes_batches_of_samples_that_it_keeps(name):
    """The collate_fn leaves a third of the samples out."""
    make, read = KINDS[name]
    rows = list(enumerate(all_rows()))
    loader = DataLoader(rows, 5, collate_fn=lambda some: make([row for i, row in some if i % 3]))
    kept = [row for i, row in rows if i % 3]
    model = compiled(Squares(read), accumulate_grad_batches=3)
    history = model.fit(loader, verbose=0)
    x = read(make(kept)).double()
    total = x.sum(1, keepdim=True)
    assert history["loss"][-1] == pytest.approx(float((total**2).mean()), rel=1e-5)
    torch.testing.assert_close(
        model.net.weight[0].double(), 1 - 0.1 * (2 * total * x).mean(0), rtol=1e-5, atol=1e-6
    )


DISAGREE = {
    "anchors": ({"anchor": torch.rand(2, 3), "negative": torch.rand(9, 3)}, "anchor", 2),
    "edges": ({"edges": torch.zeros(2, 9), "x": torch.rand(5, 3)}, "edges", 2),
    "flat targets": ((torch.rand(7, 6, 3), (torch.rand(30), torch.rand(6))), r"y\[0\]", 30),
    "a short target": ((torch.rand(7, 3), torch.rand(6)), "y", 6),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_entries_that_disagree_are_named_once_also_in_a_later_batch(name):
    batch, place, number = DISAGREE[name]
    assert samples.samples_of(batch) == number

    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            return self.net(torch.ones(1, 3)).mean()

    model = compiled(Own(nn.Linear(3, 1)))
    agreeing = (torch.rand(4, 3), torch.rand(4))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit([agreeing, batch, batch], epochs=2, verbose=0)
        model.fit([batch], verbose=0)
    (said,) = [str(one.message) for one in seen if "FK060" in str(one.message)]
    assert f"counts {place}".replace("\\", "") in said or place in said


def test_what_says_its_number_ends_the_doubt():
    batch = Record(anchor=torch.rand(2, 3), negative=torch.rand(9, 3))
    assert samples.counted(batch).doubt is not None
    batch.samples = 5
    assert samples.counted(batch) == samples.Counted(5)
    inner = Record(x=torch.rand(9, 3))
    inner.samples = 3
    batch["inner"] = inner
    assert samples.samples_of(batch) == 5  # the outermost


def test_a_property_that_gives_no_number_is_asked_once():
    asked = []

    class Folder:
        def __len__(self):
            return 4

        @property
        def samples(self):
            asked.append(1)
            return [torch.rand(3)] * 4

    assert [samples.samples_of({"x": Folder()}) for _ in range(3)] == [4, 4, 4]
    assert len(asked) == 1
