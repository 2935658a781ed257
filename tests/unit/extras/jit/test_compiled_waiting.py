"""`steps_per_execution` with `jit_compile`: batches that waited in vain learn as if none waited."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import fitkit
from fitkit.extras.jit.programs import traces_gradients
from tests.compiling import HAS_COMPILER, TRACED, Branching

pytestmark = [
    pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients"),
    pytest.mark.filterwarnings("ignore:jit_compile"),
]

torch.manual_seed(0)
X, Y = torch.randn(84, 6), torch.randint(3, (84,))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.out = kind(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.layer(x.view(-1, 3, 2))[0][:, -1])


class Late(nn.Module):
    """A net of which another part learns from some epoch on."""

    def __init__(self):
        super().__init__()
        self.first, self.late, self.is_late = nn.Linear(6, 3), nn.Linear(6, 3), False

    def forward(self, x):
        return self.first(x) + self.late(x) if self.is_late else self.first(x)


def averaging():
    norm = nn.BatchNorm1d(8, momentum=None)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3))


NETS = {
    "LSTM": partial(Recurrent, nn.LSTM),
    "GRU": partial(Recurrent, nn.GRU),
    "RNN": partial(Recurrent, nn.RNN),
    "branches": Branching,
    "a mean of all batches": averaging,
    "learns more later": Late,
}
WEIGHED = "weighed classes, reused arrays"
OPTIONS = {
    "plain": {},
    "clipping": {"gradient_clip_val": 0.05},
    "accumulation": {"accumulate_grad_batches": 2},
    "a rate for each step": {
        "lr_scheduler": {
            "scheduler": partial(optim.lr_scheduler.StepLR, step_size=2, gamma=0.8),
            "interval": "step",
        }
    },
    "bf16-mixed": {"precision": "bf16-mixed"},
    "two optimizers": {"two": True},
    WEIGHED: {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}, "reuses": True},
}
OWN = ("two", "reuses", "class_weight")  # not arguments of `compile`
EPOCHS, SIZE = 2, 8


class Thaw(fitkit.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.net.is_late = epoch > 0


def optimizers_of(net, *, two):
    first, *others = net.children() if two else [net]
    groups = [list(first.parameters()), [p for other in others for p in other.parameters()]]
    return [optim.SGD(group, 0.1, momentum=0.9) for group in groups if group]


def batches():
    """Batches in the same two arrays, as generators write them."""
    x, y = np.empty((SIZE, 6), np.float32), np.empty(SIZE, np.int64)
    for start in range(0, len(X), SIZE):
        count = len(X[start : start + SIZE])
        x[:count], y[:count] = X[start : start + SIZE], Y[start : start + SIZE]
        yield x[:count], y[:count]


def plainly_trained(net, options):
    """The weights after a loop of plain PyTorch."""
    optimizers = optimizers_of(net, two="two" in options)
    weights = options.get("class_weight")
    weights = torch.tensor(list(weights.values())) if weights else torch.ones(3)
    accumulate, steps = options.get("accumulate_grad_batches", 1), 0
    for epoch in range(EPOCHS):
        net.is_late = epoch > 0
        starts = list(range(0, len(X), SIZE))
        for number in range(0, len(starts), accumulate):
            group = starts[number : number + accumulate]
            count = sum(len(X[start : start + SIZE]) for start in group)
            net.zero_grad()
            for start in group:
                x, y = X[start : start + SIZE], Y[start : start + SIZE]
                with torch.autocast("cpu", torch.bfloat16, enabled="precision" in options):
                    output = net(x)
                losses = F.cross_entropy(output.float(), y, reduction="none") * weights[y]
                (losses.sum() / count).backward()
            if "gradient_clip_val" in options:
                nn.utils.clip_grad_norm_(net.parameters(), options["gradient_clip_val"])
            steps += 1
            for optimizer in optimizers:
                optimizer.step()
                if "lr_scheduler" in options:
                    optimizer.param_groups[0]["lr"] = 0.1 * 0.8 ** (steps // 2)
    return net.state_dict()


def check(net, options, steps, jit_compile):
    torch.manual_seed(1)
    net = NETS[net]()
    expected = plainly_trained(copy.deepcopy(net), options)
    given = {name: options[name] for name in options if name not in OWN}
    model, optimizers = fitkit.Model(net), optimizers_of(net, two="two" in options)
    model.compile(optimizers, "cross_entropy", accelerator="cpu", devices=1,
                  steps_per_execution=steps, jit_compile=jit_compile, **given)  # fmt: skip
    more = {"class_weight": options.get("class_weight"), "callbacks": [Thaw()], "verbose": 0}
    if "reuses" in options:
        for epoch in range(EPOCHS):
            model.fit(batches(), epochs=epoch + 1, initial_epoch=epoch, **more)
    else:
        model.fit(X, Y, batch_size=SIZE, shuffle=False, epochs=EPOCHS, **more)
    tolerance = 2e-3 if "precision" in options else 1e-6
    for name, value in expected.items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("net", "options"),
    [*((net, "plain") for net in ("LSTM", "branches")),
     *(pytest.param(net, "plain", marks=pytest.mark.slow)
       for net in ("GRU", "RNN", "learns more later", "a mean of all batches")),
     *(pytest.param("branches", one, marks=pytest.mark.slow) for one in list(OPTIONS)[1:]),
     ("GRU", "a rate for each step"), ("learns more later", WEIGHED),
     ("a mean of all batches", "clipping")],
)  # fmt: skip
def test_batches_that_waited_learn_one_by_one(net, options):
    steps = 4 if len(net + options) % 2 else 8
    check(net, OPTIONS[options], steps, TRACED)


@HAS_COMPILER
@pytest.mark.parametrize(
    ("options", "steps"), [("plain", 4), ("a rate for each step", 8), (WEIGHED, 4)]
)
def test_batches_that_waited_for_a_loop_learn_one_by_one(steps, options):
    check("branches", OPTIONS[options], steps, True)
