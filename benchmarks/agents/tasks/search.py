"""Search settings, stop, and continue the search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, mlp, near, read_json, train, write

PROMPT = """
data.npz has x (96, 8) and y (96,) to train on, and val_x (48, 8) and val_y (48,) to validate
with: float32 inputs and class numbers from 0 to 2. The net is Linear(8, 16), ReLU,
Linear(16, 3), and gives logits. start.pt is the state dict of its torch Sequential; begin each
run with these weights. A run is 3 epochs by SGD on the cross entropy, in batches of 16, in the
order of the data, without shuffling. What counts is the mean validation loss after the last
epoch.

Search the learning rate, between 0.001 and 1 on a logarithmic scale, and the momentum, between
0 and 0.9, by random settings. The program has two parts. The first does 4 runs and keeps the
search in a folder. The second stands for a later start: it continues that search to 10 runs in
all, without repeating any.

Write first.json, a list of the first part's runs, and all.json, a list of all 10, each a dict
with "rate", "momentum" and "value", the validation loss; and best.json, such a dict of the best
of the 10.
"""
WRONG = ('write("all.json", searched(10))', 'write("all.json", searched(4))')


def give(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(96), classes(48, seed=1)
    write(folder, mlp(), x=x, y=y, val_x=val_x, val_y=val_y)


def value(rate: float, momentum: float) -> float:
    (x, y), (val_x, val_y), net = classes(96), classes(48, seed=1), mlp()
    sgd = torch.optim.SGD(net.parameters(), rate, momentum=momentum)
    train(net, x, y, batch=16, epochs=3, optimizer=sgd)
    with torch.no_grad():
        return F.cross_entropy(net(val_x), val_y).item()


def check(folder: Path) -> None:
    first, every = read_json(folder, "first.json"), read_json(folder, "all.json")
    assert len(first) == 4, f"first.json has {len(first)} runs"
    assert len(every) == 10, f"all.json has {len(every)} runs"
    settings = {(run["rate"], run["momentum"]) for run in every}
    assert len(settings) == 10, f"all.json has {len(settings)} settings"
    missing = {(run["rate"], run["momentum"]) for run in first} - settings
    assert not missing, f"runs of first.json aren't in all.json: {missing}"
    rates, momenta = np.array(sorted(settings)).T
    assert rates.min() >= 0.001 and rates.max() <= 1, f"rates from {rates.min()} to {rates.max()}"
    assert (rates < 0.1).sum() >= 3, "the rates aren't on a logarithmic scale"
    assert momenta.min() >= 0 and momenta.max() <= 0.9, f"momenta up to {momenta.max()}"
    for run in every:
        near(run["value"], value(run["rate"], run["momentum"]), f"the value of {run}")
    best = min(every, key=lambda run: run["value"])
    assert read_json(folder, "best.json") == best, f"best.json isn't {best}"
