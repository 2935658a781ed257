"""Mix training samples and their labels."""

from __future__ import annotations

from pathlib import Path

import torch
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
data.npz has x (100, 8) and y (100,) to train on, and val_x (50, 8) and val_y (50,) to
validate with: float32 inputs and class numbers from 0 to 2. The net is Linear(8, 16), ReLU,
Linear(16, 3), and gives logits. start.pt is the state dict of its torch Sequential; begin
with these weights. Train for 4 epochs by plain SGD, learning rate 0.3, in batches of 20, in
the order of the data.

Training batches are mixed, as MixUp does it, but by a fixed ratio: a row becomes 0.7 times
itself plus 0.3 times the row before it in the batch. Before the first row comes the last. The
same is done to the labels, as rows of three probabilities. The loss is the cross entropy with
them. Validation data aren't mixed.

Write weights.pt, the trained net's state dict (torch.save), and history.json with "val_loss":
a list of the mean validation loss after each epoch.
"""
WRONG = ("return mix(x), mix(one_hot)", "return mix(x), one_hot")


def give(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(), classes(50, seed=1)
    write(folder, mlp(), x=x, y=y, val_x=val_x, val_y=val_y)


def check(folder: Path) -> None:
    (x, y), (val_x, val_y), net = classes(), classes(50, seed=1), mlp()
    before = torch.arange(100).view(5, 20).roll(1, 1).flatten()
    soft = F.one_hot(y, 3).float()
    losses: list[float] = []
    train(
        net, 0.7 * x + 0.3 * x[before], 0.7 * soft + 0.3 * soft[before], batch=20, epochs=4,
        rate=0.3,
        after_epoch=lambda: losses.append(F.cross_entropy(net(val_x), val_y).item()),
    )  # fmt: skip
    same_weights(read_weights(folder), net)
    near(read_json(folder, "history.json")["val_loss"], losses, "val_loss")
