"""Stop early, and keep the weights of the best epoch."""

from __future__ import annotations

import copy
from pathlib import Path

from torch.nn import functional as F

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    near,
    read_json,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (40, 8) and y (40,) to train on, and val_x (40, 8) and val_y (40,) to validate
with: float32 inputs and class numbers from 0 to 2. The net is Linear(8, 16), ReLU,
Linear(16, 3), and gives logits. start.pt is the state dict of its torch Sequential; begin
with these weights. Train by plain SGD, learning rate 0.5, on the cross entropy, in batches of
20, in the order of the data, for at most 200 epochs. Stop after the third epoch in a row
whose validation loss isn't below the lowest so far.

Write weights.pt, the state dict (torch.save) of the net after the epoch with the lowest
validation loss, and result.json with "epochs", how many epochs were trained (all of them), and
"best", that lowest validation loss.
"""
ASKED = "keras-team/keras#12511"
WRONG = ("restore_best_weights=True", "restore_best_weights=False")


def give(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(40, noise=2), classes(40, seed=1, noise=2)
    write(folder, mlp(), x=x, y=y, val_x=val_x, val_y=val_y)


def check(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(40, noise=2), classes(40, seed=1, noise=2)
    net = mlp()
    best, best_net, epochs, bad = float("inf"), net, 0, 0
    while bad < 3 and epochs < 200:
        train(net, x, y, batch=20, epochs=1, rate=0.5)
        epochs, bad = epochs + 1, bad + 1
        loss = F.cross_entropy(net(val_x), val_y).item()
        if loss < best:
            best, best_net, bad = loss, copy.deepcopy(net), 0
    assert 3 < epochs < 200
    result = read_json(folder, "result.json")
    near(result["epochs"], epochs, "epochs", 0)
    near(result["best"], best, "best")
    same_weights(read_weights(folder), best_net)
