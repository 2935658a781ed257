"""Gradients are clipped, and their norm is measured, over the parameters that optimizers hold."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.compiling import TRACED
from tests.nets import classification
from tests.reference import assert_same_weights, slices

X, Y = classification(44, 4, seed=1)
BATCHES = slices(X, Y, 8)  # the last one is short
CLIP = 0.1


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def last(net):
    return [torch.optim.SGD(net[2].parameters(), 0.5)]


def in_two_parts(net):
    return [torch.optim.SGD([net[2].weight], 0.5), torch.optim.SGD([net[2].bias], 0.1)]


class AddsFirst(fitkit.callbacks.Callback):
    """Gives the optimizer the first layer, too, after an epoch."""

    stops_alike = True

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            add_first(self.model.net, self.model.optimizer)


def add_first(net, optimizer):
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.2})


def by_hand(make, *, algorithm="norm", parts=1, adds=False):
    """The net of two epochs, and the norm of each update's gradients before clipping."""
    net, norms = made(), []
    optimizers = make(net)
    for epoch in range(2):
        if adds and epoch == 1:
            add_first(net, optimizers[0])
        for start in range(0, len(BATCHES), parts):
            group = BATCHES[start : start + parts]
            net.zero_grad()
            x, y = (torch.cat(part) for part in zip(*group, strict=True))
            F.cross_entropy(net(x), y).backward()
            held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
            norms.append(nn.utils.get_total_norm([p.grad for p in held]).item())
            if algorithm == "norm":
                nn.utils.clip_grad_norm_(held, CLIP)
            else:
                nn.utils.clip_grad_value_(held, CLIP)
            for optimizer in optimizers:
                optimizer.step()
    return net, norms


@pytest.mark.parametrize("make", [last, in_two_parts])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"precision": "16-mixed"},
        {"jit_compile": TRACED},
    ],
    ids=str,
)
def test_parameters_without_an_optimizer_are_not_in_the_norm(make, settings):
    algorithm, parts = "norm", settings.get("accumulate_grad_batches", 1)
    algorithm = settings.get("gradient_clip_algorithm", algorithm)
    expected, norms = by_hand(make, algorithm=algorithm, parts=parts)
    model = fitkit.Model(made())
    optimizers = make(model.net)
    model.compile(
        optimizers if len(optimizers) > 1 else optimizers[0], "cross_entropy",
        gradient_clip_val=CLIP, devices=1, accelerator="cpu", **settings,
    )  # fmt: skip
    watch = fitkit.callbacks.NormMonitor()
    watches = [] if "jit_compile" in settings else [watch]
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=watches)
    half = "precision" in settings
    assert_same_weights(model.net, expected, atol=5e-3 if half else 1e-6)
    if watches:
        assert watch.norms == pytest.approx(norms, rel=2e-2 if half else 1e-5)


def test_parameters_that_an_optimizer_gets_later_are_clipped_from_then_on():
    expected, norms = by_hand(last, adds=True)
    model = fitkit.Model(made())
    (optimizer,) = last(model.net)
    model.compile(optimizer, "cross_entropy", gradient_clip_val=CLIP, accelerator="cpu")
    watch = fitkit.callbacks.NormMonitor()
    callbacks = [AddsFirst(), watch]
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert_same_weights(model.net, expected, atol=1e-6)
    assert watch.norms == pytest.approx(norms, rel=1e-5)
