"""How many Python and C functions a step calls: no clock, so the same on every machine.

A limit that fails says that every step of every training does more than it did. Where that has a
reason, raise it; where a step has become cheaper, lower it. The counts change a little with torch:
the limits are a few per cent above what torch 2.13 on Python 3.11 gives, and below what the next
thing would bring that somebody adds unthinkingly (a walk over a tree of two tensors is some 30
calls, a metric's own update 60).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from tests.limits import patience

BATCH = 32


def calls_a_step(run):
    """Calls from the first forward pass to the last, for each step between."""
    forward = nn.ReLU.forward.__code__  # the net has one of these layers
    count, marks = 0, []

    def note(frame, event, argument):
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if event == "call" and frame.f_code is forward:
                marks.append(count)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def compiled(metrics):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", metrics=list(metrics) or None, accelerator="cpu")
    return model


def data(steps=40):
    return torch.randn(steps * BATCH, 32), torch.randint(10, (steps * BATCH,))


def second_call(verb, *data, **options):
    """A call of a verb, after a first that makes what is made once."""

    def call():
        verb(*data, **options, verbose=0)

    call()
    return call


def from_loader(metrics=("accuracy",), steps=40, **options):
    loader = DataLoader(TensorDataset(*data(steps)), BATCH, shuffle=True)
    return second_call(compiled(metrics).fit, loader, **options)


def from_arrays():
    return second_call(compiled(["accuracy"]).fit, *data(), batch_size=BATCH)


def evaluated():
    return second_call(compiled(["accuracy"]).evaluate, *data(), batch_size=BATCH)


def predicted():
    return second_call(compiled([]).predict, data()[0], batch_size=BATCH)


def one_by_one(verb, *names):
    """Calls of a verb of single batches, each with its values read."""
    model, batch = compiled(["accuracy"]), dict(zip("xy", data(1), strict=True))

    def calls():
        for _ in range(10):
            getattr(model, verb)(*(batch[name] for name in names))

    calls()
    return calls


LIMITS = {
    "a loader of a TensorDataset, Adam and accuracy by name": (from_loader, 308),
    "the same with three metrics": (lambda: from_loader(("accuracy", "f1", "recall")), 386),
    "the same without metrics": (lambda: from_loader(()), 290),
    "arrays, Adam and accuracy by name": (from_arrays, 286),
    "evaluate on arrays": (evaluated, 65),
    "predict on arrays": (predicted, 43),
    "train_on_batch": (lambda: one_by_one("train_on_batch", "x", "y"), 603),
    "test_on_batch": (lambda: one_by_one("test_on_batch", "x", "y"), 397),
    "predict_on_batch": (lambda: one_by_one("predict_on_batch", "x"), 260),
}
"""What is run, and the most calls that a step of it may make."""


@pytest.fixture(scope="module")
def counted():
    """Each scenario's calls, in a process of their own: the first net that any test has compiled
    by torch.compile adds 16 calls to each step of all optimizers from then on (torch 2.13)."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_calls_per_step"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
        timeout=patience(100),
    )  # fmt: skip
    return json.loads(ran.stdout)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="an optimizer's step in torch before 2.13 calls more itself: some 35 functions in 2.10",
)
@pytest.mark.parametrize("scenario", LIMITS)
def test_a_step_calls_no_more_functions_than_it_did(scenario, counted):
    assert counted[scenario] <= LIMITS[scenario][1]


def test_steps_of_a_long_epoch_call_no_more_than_those_of_a_short_one():
    short, long = (calls_a_step(from_loader(steps=steps)) for steps in (60, 240))
    assert long <= 1.05 * short


if __name__ == "__main__":
    # Each step of an optimizer asks whether a CUDA graph is being captured: 4 calls of a torch that
    # was built for the CPU, 18 of 2.15 built for CUDA.
    for name in dir(torch.optim.Optimizer):
        if name.endswith("_graph_capture_health_check"):
            setattr(torch.optim.Optimizer, name, lambda optimizer: None)
    print(json.dumps({name: calls_a_step(make()) for name, (make, _) in LIMITS.items()}))
