"""Copies beside what is computed, with a double of the streams: what comes before what."""

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Batch
from fitkit.data.sources import IterableSource, make_source
from fitkit.data.to_device import LEAD, Mover, Transfer, goes_aside
from fitkit.training import step as step_module


class Streams:
    """Writes down what it is asked for."""

    def __init__(self, device=None, free=2**30):
        self.events, self.free = [], free
        self.marks = 0
        self.is_aside = False

    @contextlib.contextmanager
    def aside(self, *, after=False):
        self.is_aside = True
        yield
        self.is_aside = False

    def mark(self):
        self.marks += 1
        self.events.append((f"mark {self.marks}", self.is_aside))
        return self.marks

    def wait(self, mark):
        self.events.append((f"wait {mark}", self.is_aside))

    def wait_on_host(self, mark):
        self.events.append((f"host waits {mark}", self.is_aside))

    def used_here(self, tensor):
        self.events.append(("used", self.is_aside))

    def pinned(self, tensor):
        return tensor.clone()  # as a copy, so that what comes out is new memory

    def free_bytes(self):
        return self.free


def brought(batches, transfer, streams):
    """The batches of a mover with these streams."""
    given = (Batch(data, 1, 1) for data in batches)
    moved = Mover(transfer, streams=lambda device: streams).bring_each(given)
    return (batch.data for batch in moved)


class Copying(Transfer):
    def __init__(self, streams):
        super().__init__(torch.device("cpu"), torch.float32)
        self.streams = streams
        self.pin = streams.pinned

    def __call__(self, batch, *, is_lent):
        self.streams.events.append(("copy", self.streams.is_aside))
        return super().__call__(batch, is_lent=is_lent)


def test_a_batch_is_copied_aside_and_waited_for_where_it_is_used():
    streams = Streams()
    batches = iter([(torch.ones(2, 3), torch.ones(2))])
    list(brought(batches, Copying(streams), streams))
    assert streams.events == [
        ("copy", True), ("mark 1", True), ("wait 1", False), ("used", False), ("used", False),
        ("mark 2", False),
    ]  # fmt: skip


def test_no_batch_is_read_before_it_is_asked_for():
    read = []

    def reading():
        for number in range(4):
            read.append(number)
            yield (torch.full((1,), float(number)),)

    streams = Streams()
    for number, _ in enumerate(brought(reading(), Copying(streams), streams)):
        assert read == list(range(number + 1))


def test_the_host_waits_for_what_was_computed_some_batches_ago_and_no_more():
    streams = Streams()
    for _ in brought(iter([(torch.ones(1),)] * (LEAD + 2)), Copying(streams), streams):
        pass
    waits = [event for event, _ in streams.events if event.startswith("host")]
    assert waits == ["host waits 2", "host waits 4"]  # each batch makes two marks


def test_shares_keep_their_counts_and_what_is_fed_is_not_moved_again():
    streams, share = Streams(), Batch((torch.ones(2, 3, dtype=torch.float64),), 2, 5)
    transfer = Copying(streams)
    (given,) = Mover(transfer, streams=lambda device: streams).bring_each(iter([share]))
    assert (given.samples, given.total) == (2, 5)
    assert given.data[0].dtype == torch.float32
    assert not given.is_lent and transfer(given.data, is_lent=False) is given.data


class Pinned(torch.Tensor):
    """Says that it is pinned, on a machine that can't pin."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def is_pinned(self):
        return True


@pytest.mark.parametrize("pins", [False, True])
def test_the_device_fetches_from_memory_that_nobody_fills_again(pins):
    buffer = torch.zeros(2, 3).as_subclass(Pinned)

    def filling():
        for number in range(3):
            buffer.fill_(number)
            yield {"x": buffer}

    streams = Streams()
    transfer = Copying(streams)
    transfer.pins = pins
    fetched, to = [], torch.Tensor.to

    def send(tensor, *given, **named):  # as a device that fetches late
        found = to(tensor, *given, **named)
        if "non_blocking" in named:
            fetched.append(tensor)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", send)
        list(brought(filling(), transfer, streams))
    seen = [tensor.unique().tolist() for tensor in fetched]
    assert seen == ([[2.0]] * 3 if pins else [[0.0], [1.0], [2.0]])


@pytest.mark.parametrize(
    ("loader", "pins"),
    [
        (lambda: DataLoader(TensorDataset(X), 8, pin_memory=True), True),
        (lambda: DataLoader(X, 8, pin_memory=True, collate_fn=list), False),
        (lambda: DataLoader(X, 8, pin_memory=True, collate_fn=list, num_workers=1), True),
        (lambda: DataLoader([(X,)], batch_size=None, pin_memory=True), False),
        (lambda: DataLoader(TensorDataset(X), 8), False),
        (lambda: [(X,)], False),
    ],
)
def test_which_data_are_known_to_pin_new_memory(loader, pins):
    assert make_source(loader()).pins is pins


class OnlyTo:
    def to(self, device):
        return self


class Told:
    def __init__(self):
        self.streams = []

    def to(self, device):
        return self

    def record_stream(self, stream):
        self.streams.append(stream)


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str


def test_objects_that_cannot_tell_streams_are_left_to_the_step_and_others_go_aside():
    streams = Streams()
    batches = [
        (OnlyTo(), torch.ones(1)),
        {"x": Told(), "n": 3},
        Graph(torch.ones(2), "a"),
        (np.ones(2, np.float32), None),
    ]
    first, *others = brought(iter(batches), Copying(streams), streams)
    assert first is batches[0]
    assert [event for event, aside in streams.events if aside].count("copy") == 3
    assert isinstance(others[1], Graph) and isinstance(others[2][0], torch.Tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["sparse", "compressed", "nested", "jagged"])
def test_tensors_whose_memory_streams_cannot_be_told_of_are_left_to_the_step(kind):
    rows = [torch.ones(2), torch.ones(3)]
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "compressed": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor(rows),
        "jagged": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged),
    }[kind]()  # fmt: skip
    assert not goes_aside((torch.ones(3), tensor))


def test_arrays_are_kept_on_the_device_only_where_they_take_a_small_part_of_it():
    source = ArraySource((torch.zeros(100, 10), torch.zeros(100)), 10)  # 4400 bytes
    given = source.batch[0]

    def keeps(source, free):
        transfer = Transfer(torch.device("cpu"), torch.float64)
        return Mover(transfer, streams=lambda device: Streams(free=free)).bring_whole(source)

    assert not keeps(source, 4 * 4400 - 1) and source.batch[0] is given
    assert keeps(source, 4 * 4400) and source.batch[0].dtype == torch.float64
    assert not keeps(IterableSource([1, 2]), 2**40)
    assert not Mover(Transfer(torch.device("cpu"), torch.float32)).bring_whole(source)


@pytest.fixture
def with_streams(monkeypatch):
    made = []

    def make(device):
        made.append(Streams())
        return made[-1]

    class Fed(Mover):
        def __init__(self, transfer, own=None):
            super().__init__(transfer, own, make)

    monkeypatch.setattr(step_module, "Mover", Fed)
    return made


torch.manual_seed(0)
X, Y = torch.randn(60, 4), torch.randint(0, 3, (60,))


def data(kind):
    if kind == "arrays":
        return (X, Y), {"batch_size": 8}
    return (DataLoader(TensorDataset(X, Y), 8, shuffle=True),), {}


class Own(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def transfer_batch_to_device(self, batch, device):
        return (batch[0].to(device) * 2, *batch[1:])


def run(kind, model_class=fitkit.Model, **options):
    torch.manual_seed(3)
    model = model_class(nn.Linear(4, 3))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    arguments, named = data(kind)
    history = model.fit(
        *arguments, **named, **options, epochs=3, verbose=0, validation_data=(X, Y)
    ).history
    return history, model.predict(X, verbose=0).tolist()


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 5}])
@pytest.mark.parametrize("model_class", [fitkit.Model, Own])
@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_a_fed_training_is_the_same(kind, model_class, options, request):
    plain = run(kind, model_class, **options)
    made = request.getfixturevalue("with_streams")
    assert run(kind, model_class, **options) == plain
    assert bool(made) == (model_class is fitkit.Model)


def test_the_place_in_the_data_is_that_of_the_batch_which_runs(with_streams):
    places = []

    class Note(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            places.append(self.model._fitkit.fit_state.run.progress.batches)

    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    model.fit(data("loader")[0][0], steps_per_epoch=4, verbose=0, callbacks=[Note()])
    assert places == [1, 2, 3, 4]
