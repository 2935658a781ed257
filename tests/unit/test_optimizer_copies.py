"""An optimizer given as an object has, in every copy, all that it holds."""

import copy
import pickle

import cloudpickle
import pytest
import torch
from torch import optim
from torch.nn import functional as F

import fitkit
from tests.nets import dense, normal
from tests.reference import assert_same_weights, plain_loop, slices

X = normal(48, 6)
Y = (X[:, :3].sum(1) > 0).long()
WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
}


class Shrinking(optim.SGD):
    factor = 1.0

    def __init__(self, params, factor=0.25):
        super().__init__(params, lr=0.1)
        self.factor = factor

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(self.factor)
        return super().step(closure)


class Lookahead(optim.Optimizer):
    """Has another optimizer inside, which shares its groups, and a hook of its own."""

    def __init__(self, params, every=4):
        self.base = optim.SGD(params, lr=0.1, momentum=0.9)
        self.every, self.steps = every, 0
        super().__init__(self.base.param_groups, {"lr": 0.1})
        self.param_groups = self.base.param_groups
        self.register_step_post_hook(self.look)

    def step(self, closure=None):
        return self.base.step(closure)

    @torch.no_grad()
    def look(self, *arguments):
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.clone())
            if self.steps % self.every == 0:
                p.copy_(slow.lerp_(p, 0.5))


def halved(optimizer, args, kwargs):
    """A hook that matters."""
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)


def hooked(params):
    optimizer = optim.Adam(params, 0.05)
    optimizer.register_step_post_hook(halved)
    return optimizer


KINDS = {"attribute": Shrinking, "inside": Lookahead, "hook": hooked}


def compiled(kind):
    model = fitkit.Model(dense(6, 8, 2, seed=1))
    model.compile(KINDS[kind](model.parameters()), "cross_entropy", accelerator="cpu", devices=1)
    return model


def fit(model, epochs=1, **options):
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def plainly(kind, epochs):
    net = dense(6, 8, 2, seed=1)
    plain_loop(net, KINDS[kind](net.parameters()), slices(X, Y, 8), epochs, loss=F.cross_entropy)
    return net


@pytest.mark.parametrize("fits", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_model_trains_with_all_of_it(kind, way, fits):
    model = compiled(kind)
    if fits:
        fit(model)
    made = WAYS[way](WAYS[way](model))
    fit(made, 2)
    assert_same_weights(made.net, plainly(kind, 2 + fits), atol=1e-6)
    fit(model)
    assert_same_weights(model.net, plainly(kind, 1 + fits), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_the_same(tmp_path, kind):
    model, resumed = compiled(kind), compiled(kind)
    fit(model)
    model.save(tmp_path / "c.h5")
    fit(resumed, 3, resume_from=tmp_path / "c.h5")
    assert_same_weights(resumed.net, plainly(kind, 3), atol=1e-6)
    shared = getattr(resumed.optimizer, "base", resumed.optimizer)
    assert shared.param_groups is resumed.optimizer.param_groups
