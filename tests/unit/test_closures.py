"""An optimizer whose step uses its closure gets one, which gives what a plain loop gives."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import fitkit
from fitkit.closures import uses_closure
from tests.nets import dense, normal
from tests.reference import assert_same_weights, slices

X = normal(48, 6).double()
Y = (X[:, :3].sum(1) > 0).long()


def net():
    return dense(6, 8, 2, seed=1).double()


class Base(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def move(self, factor):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=factor)


class SAM(Base):
    """Uses the gradients that are there, and computes them again beside the weights."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.base = optim.SGD(self.param_groups, lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        held = self.param_groups[0]["params"]
        before = [p.clone() for p in held]
        for p in held:
            p.data.add_(p.grad, alpha=0.05)  # past torch's counters
        self.zero_grad()
        closure()
        for p, value in zip(held, before, strict=True):
            p.data = value
        self.base.step()


class Asserting(Base):
    """Evaluates first, as torch's own."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "give a closure"
        self.zero_grad()
        with torch.enable_grad():
            first = closure()
        self.move(0.01)
        with torch.enable_grad():
            self.zero_grad()
            second = closure()
        self.move(-0.1 * float(first / second))


class Raising(Asserting):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("give a closure")
        return super().step(closure)


class Plain(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad.is_sparse:
                raise RuntimeError("no sparse gradients")
        self.move(-0.1)
        return loss


class Conditional(Plain):
    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        return loss


class HandingOn(Plain):
    def step(self, closure=None):
        return super().step(closure=closure)


class Inside(Base):
    def __init__(self, params, kind=Plain):
        super().__init__(params)
        self.inside = {"only": kind(self.param_groups)}

    def step(self, closure=None):
        return self.inside["only"].step(closure)


USING = {
    "SAM": SAM,
    "asserting": Asserting,
    "raising": Raising,
    "inside": partial(Inside, kind=SAM),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
}
WITHOUT = {"plain": Plain, "conditional": Conditional, "handing on": HandingOn, "inside": Inside,
           "Adam": optim.Adam}  # fmt: skip


def test_it_is_read_from_the_code_what_a_step_does_without():
    for needed, kinds in ((True, USING), (False, WITHOUT)):
        found = {name: uses_closure(kind(net().parameters())) for name, kind in kinds.items()}
        assert found == dict.fromkeys(kinds, needed)


def plainly(make, size, clip):
    trained = net()
    optimizer = make(trained.parameters())
    for x, y in slices(X, Y, size):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(trained.parameters(), clip)
            return loss

        closure()
        optimizer.step(closure)
    return trained


CUTS = {
    "whole": (12, {"batch_size": 12}, {}),
    "clipped": (12, {"batch_size": 12}, {"gradient_clip_val": 0.2}),
    "parts": (12, {"batch_size": 4}, {"accumulate_grad_batches": 3}),
    "a short group": (32, {"batch_size": 8}, {"accumulate_grad_batches": 4}),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", USING)
def test_it_trains_as_a_plain_loop_with_a_closure(name, cut):
    size, options, given = CUTS[cut]
    model = fitkit.Model(net())
    model.compile(
        USING[name](model.parameters()), "cross_entropy", accelerator="cpu", devices=1, **given
    )
    model.fit(X, Y, shuffle=False, verbose=0, **options)
    expected = plainly(USING[name], size, given.get("gradient_clip_val"))
    assert_same_weights(model.net, expected, atol=1e-11)
