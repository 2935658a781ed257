"""Find the sample, the batch and the layer where a training goes bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, read_json, write

PROMPT = """
data.npz has x (120, 8), float32, and y (120,), class numbers from 0 to 2. All are finite.
net.py has the function make(), which returns a torch Sequential that gives logits. start.pt is
its state dict; begin with these weights. Train by plain SGD, learning rate 0.5, on the cross
entropy, in batches of 10, in the order of the data, for at most 20 epochs.

After some epochs the loss of a batch isn't finite any more. Stop there, and find out where it
begins. Write result.json with
"epoch" and "batch": of the first batch whose loss isn't finite, both counted from 0,
"samples": the rows of x, counted from 0, for which the net's output in that batch isn't finite,
a list in rising order,
"layer": the name in the Sequential, such as "0", of the first layer whose output isn't finite.
"""
ASKED = "keras-team/keras#6921"
WRONG = ("(~np.isfinite(outputs).all(1)).nonzero()[0]", "range(len(indices))")
NET = """\
import torch
from torch import nn


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x + 2.5)


def make():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), Root(), nn.Linear(16, 3))
"""


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x + 2.5)


def start() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), Root(), nn.Linear(16, 3)
        )


def first_bad() -> dict[str, object]:
    """Return what a plain loop finds."""
    (x, y), net = classes(120), start()
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    for epoch in range(20):
        for batch in range(12):
            rows = np.arange(10 * batch, 10 * batch + 10)
            hidden, layer = x[rows], ""
            for name, module in net.named_children():
                hidden = module(hidden)
                if not hidden.isfinite().all():
                    layer = layer or name
            loss = F.cross_entropy(hidden, y[rows])
            if not loss.isfinite():
                samples = rows[(~hidden.isfinite().all(1)).numpy()].tolist()
                return {"epoch": epoch, "batch": batch, "samples": samples, "layer": layer}
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    raise RuntimeError("the training stays finite")


def give(folder: Path) -> None:
    x, y = classes(120)
    write(folder, start(), x=x, y=y)
    (folder / "net.py").write_text(NET)


def check(folder: Path) -> None:
    found = read_json(folder, "result.json")
    for name, right in first_bad().items():
        assert found[name] == right, f"{name} is {found[name]!r}, not {right!r}"
