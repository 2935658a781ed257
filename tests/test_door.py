"""A package outside the tree adds one of each kind by the door alone, and is found by name."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fitkit import seams

PACKAGE = '''
import contextlib

import numpy as np
import torch
from fitkit.loggers import Logger
from fitkit.outputs import LossHint
from fitkit.seams import (
    DATA, GUESTS, Callback, Definition, Engine, Guest, Mean, Named, OpenedData, Precision,
    SingleDevice, elements, matched, replacing
)

seen = []


class Doubled(SingleDevice):
    """Makes gradients twice as large."""

    name = "doubled"
    has_engine = True

    def engine_for(self, module, optimizers):
        return Doubling(list(module.parameters()))


class Doubling(Engine):
    def __init__(self, parameters):
        self.parameters = parameters

    def backward(self, loss):
        loss.backward()
        for parameter in self.parameters:
            parameter.grad *= 2


class Rounded(Precision):
    """Computes with inputs of whole numbers."""

    name = "rounded"

    def autocast(self, device_type):
        return contextlib.nullcontext()

    def widen(self, tree):
        return tree.round()


class Counting(Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.append(("batch", batch))


class Remembering(Logger):
    def log_scalars(self, values, step, epoch):
        seen.append(("epoch", step, values["loss"]))


def quartic(prediction, target):
    return (prediction - target) ** 4


fourth_power = Definition(quartic, elements, LossHint(task="regression"))


def largest(prediction, target):
    return (prediction - target).abs()


distance = Named(lambda first: Mean(matched, largest), weightable=True)


class Halving(torch.optim.SGD):
    """Gradient descent at half its rate."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr=lr / 2)


class Arrays:
    foreign, extra, versions = True, {}, {}

    def __init__(self, arrays):
        self.arrays = arrays

    def describe(self):
        return {name: (a.shape, torch.from_numpy(a).dtype) for name, a in self.arrays.items()}

    def read(self, name):
        return torch.from_numpy(self.arrays[name])

    def read_into(self, name, tensor):
        tensor.copy_(self.read(name))


class Archive:
    def write(self, path, weights):
        with replacing(path) as file:
            np.savez(file, **{name: part.numpy() for name, part in weights.tensors.items()})

    @contextlib.contextmanager
    def open(self, path):
        with np.load(path, allow_pickle=False) as arrays:
            yield Arrays(dict(arrays))


archive = Archive()


class LineGuest(Guest):
    """A line of the other library: it takes a dict, and adds the square of its slope."""

    def __init__(self, given):
        super().__init__(given)
        self.slope = given.slope

    def forward(self, inputs):
        return self.given.at(inputs["at"])

    def with_added(self, loss, count, terms, *, is_part):
        return loss + self.slope.square().sum(), count, terms


def opened(model, verb, arguments):
    if not hasattr(arguments.x, "points"):
        return None
    return OpenedData(arguments.x.points, None, Counting(), None)


GUESTS.add("elsewhere", LineGuest)
DATA.add("elsewhere", opened)
'''

OTHER_LIBRARY = """
import torch


class Line:
    def __init__(self):
        self.slope = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def at(self, points):
        return points @ self.slope


class Table:
    def __init__(self, x, y):
        self.points = [({"at": x}, y)]
"""

ENTRY_POINTS = """
[fitkit.strategies]
doubled = shed:Doubled
[fitkit.precisions]
rounded = shed:Rounded
[fitkit.callbacks]
counting = shed:Counting
remembering = shed:Remembering
[fitkit.losses]
fourth_power = shed:fourth_power
as_function = shed:quartic
[fitkit.metrics]
distance = shed:distance
as_function = shed:largest
[fitkit.optimizers]
halving = shed:Halving
[fitkit.formats]
.npz = shed:archive
"""

PROGRAM = """
import torch, fitkit

x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
y = torch.tensor([[1.2], [1.9], [3.4], [3.8]], dtype=torch.float64)


def net():
    made = torch.nn.Linear(1, 1).double()
    torch.nn.init.ones_(made.weight), torch.nn.init.zeros_(made.bias)
    return made


model = fitkit.Model(net())
model.compile(
    "halving", "fourth_power", metrics=["distance"], strategy="doubled", learning_rate=0.01
)
model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=["counting", ["remembering"]])
by_hand, losses = net(), []
for part in (slice(0, 2), slice(2, 4)):  # half the rate, twice the gradient
    loss = ((by_hand(x[part]) - y[part]) ** 4).mean()
    losses.append(loss.item())
    for weight, gradient in zip(
        by_hand.parameters(), torch.autograd.grad(loss, list(by_hand.parameters()))
    ):
        weight.data -= 0.01 * gradient
for ours, theirs in zip(model.net.parameters(), by_hand.parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

import shed
assert shed.seen[:2] == [("batch", 0), ("batch", 1)], shed.seen
(kind, step, value), = shed.seen[2:]
assert kind == "epoch" and abs(value - sum(losses) / 2) < 1e-9, (shed.seen, losses)

model.compile(
    loss="as_function", metrics=["distance", "as_function"], precision="rounded", strategy="auto"
)
found = model.evaluate(x, y, verbose=0, return_dict=True)
expected = (by_hand(x).round() - y).abs().mean().item()
assert abs(found["distance"] - expected) < 1e-9, (found, expected)
assert abs(found["as_function"] - expected) < 1e-9, (found, expected)
expected = ((by_hand(x).round() - y) ** 4).mean().item()
assert abs(found["loss"] - expected) < 1e-9, (found, expected)

model.save_weights("weights.npz")
twin = fitkit.Model(net())
twin.load_weights("weights.npz")
assert all(torch.equal(a, b) for a, b in zip(twin.net.parameters(), model.net.parameters()))

import elsewhere

model, line = fitkit.Model(elsewhere.Line()), elsewhere.Line()
model.compile("sgd", "mse", learning_rate=0.01)
logs = model.fit(elsewhere.Table(x, y), verbose=0).history
assert isinstance(model.net, elsewhere.Line) and shed.seen[-1] == ("batch", 0)
loss = ((line.at(x) - y) ** 2).mean() + line.slope.square().sum()
(gradient,) = torch.autograd.grad(loss, [line.slope])
expected = (line.slope - 0.01 * gradient).detach()
torch.testing.assert_close(model.net.slope.data, expected, rtol=1e-12, atol=1e-12)
assert abs(logs["loss"][0] - loss.item()) < 1e-9
try:
    model.compile(jit_compile=True)
except fitkit.ConfigurationError as error:
    assert "can't compile Line" in str(error)
print("found by name")
"""


@pytest.mark.timeout(120)
def test_a_package_outside_the_tree_is_found_by_name(tmp_path):
    (tmp_path / "shed.py").write_text(PACKAGE)
    (tmp_path / "elsewhere.py").write_text(OTHER_LIBRARY)
    information = tmp_path / "shed-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: shed\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    found = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.stdout == "found by name\n", found.stderr


def test_it_imports_the_door_and_public_names_alone():
    theirs = {
        node.module
        for node in ast.walk(ast.parse(PACKAGE))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("fitkit")
    }
    assert theirs == {"fitkit.seams", "fitkit.loggers", "fitkit.outputs"}


@pytest.mark.parametrize("page", seams.PAGES)
def test_a_page_of_the_door_is_as_wide_as_a_kind_of_extra_needs(page):
    module = importlib.import_module(f"fitkit.seams.{page}")
    assert 1 <= len(module.__all__) <= 40
    assert ">>> from fitkit.seams." in (module.__doc__ or "")  # its examples run in tests/docs


def test_each_name_has_one_page_which_the_door_finds():
    pages = {page: importlib.import_module(f"fitkit.seams.{page}") for page in seams.PAGES}
    names = [name for module in pages.values() for name in module.__all__]
    assert len(names) == len(set(names))
    assert all(
        getattr(seams, name) is getattr(module, name)
        for module in pages.values()
        for name in module.__all__
    )
    with pytest.raises(AttributeError, match="pages"):
        seams.no_such_name  # noqa: B018
