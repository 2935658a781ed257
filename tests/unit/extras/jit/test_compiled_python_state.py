"""Compiled steps and Python: numbers that change, draws, and what a first batch leaves."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.compiling import TRACED
from tests.nets import classification

X, Y = classification(40, 6)
BATCHES = [*zip(X.split(4), Y.split(4), strict=True)]


@pytest.fixture(autouse=True)
def few_traces():
    """Torch traces a step that always differs three times, not eight, before it gives it up."""
    with torch._dynamo.config.patch(recompile_limit=3):
        yield


class Net(nn.Module):
    """Scales its outputs by a number that forward changes, at one of several places."""

    def __init__(self, place):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.place = nn.Linear(6, 3), place
        self.number, self.numbers, self.held = 1.0, [1.0], {"scale": 1.0}

    def forward(self, x):
        if self.place == "attribute":
            self.number *= 0.9
            return self.layer(x) * self.number
        if self.place == "list":
            self.numbers[0] *= 0.9
            return self.layer(x) * self.numbers[0]
        if self.place == "dict":
            self.held["scale"] *= 0.9
            return self.layer(x) * self.held["scale"]
        if self.place == "argument":
            self.number *= 0.9
            return torch.clamp(self.layer(x), max=self.number)
        if self.place == "integer":
            self.number = int(self.number) + 1
            return self.layer(x) / self.number
        self.number = self.number * 0.9
        return self.layer(x) + (1.0 if self.number > 0.5 else 0.0) * x[:, :3]


def trained(net, jit_compile, **options):
    model = fitkit.Model(net)
    settings = {"learning_rate": 0.1, "accelerator": "cpu", "devices": 1, **options}
    model.compile("sgd", "cross_entropy", jit_compile=jit_compile, **settings)
    model.fit(BATCHES, verbose=0)
    return model


def plain(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


SLOW_PLACES = [
    pytest.param(place, marks=pytest.mark.slow) for place in ("list", "dict", "argument", "integer")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["attribute", "branch", *SLOW_PLACES])
def test_a_number_that_forward_changes_is_never_frozen(place):
    how = True if place == "attribute" else TRACED  # torch's compiler freezes what it traced
    found, wanted = trained(Net(place), how).net, plain(Net(place))
    torch.testing.assert_close(found.layer.weight, wanted.layer.weight)
    assert vars(found)["numbers"] == wanted.numbers
    assert (found.number, found.held) == (wanted.number, wanted.held)


class Annealed(fitkit.Model):
    """A step of its own whose loss has a factor, changed inside or by a callback."""

    beta = 0.0

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + self.beta * out.square().mean()


class Anneal(fitkit.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.beta = 0.1 * (batch + 1)


@pytest.mark.filterwarnings("ignore")
def test_a_number_that_a_callback_changes_is_used_at_once():
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    wanted = copy.deepcopy(net)
    model = Annealed(net)
    model.compile("sgd", learning_rate=0.1, jit_compile=TRACED, accelerator="cpu", devices=1)
    model.fit(BATCHES, verbose=0, callbacks=Anneal())
    optimizer = torch.optim.SGD(wanted.parameters(), 0.1)
    for number, (x, y) in enumerate(BATCHES):
        optimizer.zero_grad()
        out = wanted(x)
        (F.cross_entropy(out, y) + 0.1 * (number + 1) * out.square().mean()).backward()
        optimizer.step()
    torch.testing.assert_close(net.weight, wanted.weight)


DRAWS = {
    "uniform": lambda: random.uniform(0.9, 1.1),
    "random": random.random,
    "gauss": lambda: random.gauss(1.0, 0.1),
    "numpy": lambda: float(np.random.rand()),
}


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.draw = nn.Linear(6, 3), draw

    def forward(self, x):
        return self.layer(x * self.draw())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_of_python_and_numpy_are_those_of_the_step_as_written(kind):
    weights = []
    for jit_compile in (True, None):
        random.seed(3)
        np.random.seed(3)
        net = Noisy(DRAWS[kind])
        weights.append((trained(net, TRACED).net if jit_compile else plain(net)).layer.weight)
    torch.testing.assert_close(*weights)


class Remembering(nn.Module):
    """Changes in its forward whatever a module can reach."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.queue, self.calls = [torch.zeros((), dtype=dtype)], 0
        self.kept = {"n": torch.zeros((), dtype=dtype)}

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
            self.seen += 1
            self.queue[0] += 1
            self.kept["n"] += 1
        self.calls += 1
        return self.layer(x.to(self.seen.dtype))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_first_batch_of_a_compiled_step_counts_once(steps_per_execution, dtype):
    nets = [Remembering(dtype).to(dtype) for _ in range(2)]
    found = trained(nets[0], TRACED, steps_per_execution=steps_per_execution).net
    wanted = plain(nets[1])
    torch.testing.assert_close(found.layer.weight, wanted.layer.weight)
    torch.testing.assert_close(found.teacher.weight, wanted.teacher.weight)
    numbers = found.seen, found.queue[0], found.kept["n"], found.calls
    assert [float(number) for number in numbers] == [float(len(BATCHES))] * 4
