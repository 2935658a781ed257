"""A call of a loss that only looks at it leaves nothing behind, whatever kind of state it has."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.losses import resolve
from fitkit.losses.looks import undone
from tests.nets import linear, normal
from tests.reference import assert_same_weights

P, T = normal(4, 1), normal(4)


class Remembers(nn.Module):
    """Holds what it has seen in every way that a module can."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.calls, self.kept, self.by_name = 0, [], {"total": torch.zeros(())}
        self.plain, self.array = torch.zeros(()), np.zeros(1)

    def forward(self, prediction, target):
        value = F.mse_loss(prediction.flatten(), target)
        self.mean.lerp_(value.detach(), 0.5)
        self.calls += 1
        self.kept.append(value.item())
        self.by_name["total"] += 1
        self.plain += 1
        self.array += 1
        return value + self.mean

    def state(self):
        tensors = (self.mean, self.plain, self.by_name["total"], self.array[0])
        return [*map(float, tensors), self.calls, *self.kept]


def closure():
    calls, inner = 0, Remembers()

    def loss(prediction, target):
        nonlocal calls
        calls += 1
        return inner(prediction, target)

    return loss, lambda: [calls, inner.state()]


def function():
    def loss(prediction, target):
        loss.calls += 1
        return F.mse_loss(prediction.flatten(), target)

    loss.calls = 0
    return loss, lambda: [loss.calls]


class Holds:
    """No module itself."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, prediction, target):
        return self.inner(prediction, target)


class Lists(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = [{"loss": inner}]

    def forward(self, prediction, target):
        return self.inner[0]["loss"](prediction, target)


def by_list(losses, prediction, target):
    return losses[0](prediction, target)


def kinds():
    one, other, third, fourth = Remembers(), Remembers(), Remembers(), Remembers()
    around = Around()
    return {
        "attribute": (Holds(fourth), fourth.state),
        "attribute of an attribute": (Holds(Holds(fourth)), fourth.state),
        "method of an attribute": (Holds(fourth.forward), fourth.state),
        "a module's plain list": (Lists(fourth), fourth.state),
        "list in a partial": (functools.partial(by_list, [fourth]), fourth.state),
        "module": (one, one.state),
        "method": (other.forward, other.state),
        "partial": (functools.partial(Remembers.forward, third), third.state),
        "object": (around, around.state),
        "compiled": (resolve(around), around.state),
        "closure": closure(),
        "function": function(),
    }


class Around:
    """An object that holds its losses in plain attributes and lists."""

    def __init__(self):
        self.inner, self.others = Remembers(), [Remembers()]

    def __call__(self, prediction, target):
        return self.inner(prediction, target) + self.others[0](prediction, target)

    def state(self):
        return [self.inner.state(), self.others[0].state()]


@pytest.mark.parametrize("kind", kinds())
def test_a_look_leaves_nothing(kind):
    loss, state = kinds()[kind]
    value = loss(P, T)
    before, drawn = repr(state()), torch.get_rng_state()
    with undone(loss):
        torch.rand(3)
        loss(P, T)
        loss(P + 1, T)
    assert repr(state()) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.isfinite(value)


def test_a_loss_is_called_once_a_batch_though_its_shapes_look_wrong():
    """Outputs (N, 1) beside targets (N,): fitkit looks whether they are broadcast."""
    x, y = normal(12, 3), normal(12)
    plain, mine = linear(3, 1), Remembers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in torch.arange(12).split(4):
        optimizer.zero_grad()
        mine(plain(x[rows]), y[rows]).backward()
        optimizer.step()
    loss = Remembers()
    model = fitkit.Model(linear(3, 1))
    model.compile("sgd", loss, learning_rate=0.1, accelerator="cpu", devices=1)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert loss.state() == pytest.approx(mine.state())
    assert_same_weights(model.net, plain, atol=1e-7)


class Each(Remembers):
    """Gives a value for each sample."""

    def forward(self, prediction, target):
        super().forward(prediction, target)
        return (prediction - target).square()


def test_class_weights_ask_a_loss_for_nothing_that_stays():
    x, y = normal(12, 3), (torch.arange(12.0) % 2)[:, None]
    loss = Each()
    model = fitkit.Model(linear(3, 1))
    model.compile("sgd", loss, accelerator="cpu", devices=1)
    model.fit(x, y, batch_size=4, class_weight={1: 2.0}, verbose=0)
    assert loss.calls == 3
