"""Validate and keep a moving average of the weights."""

from __future__ import annotations

import copy
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
with these weights. Train for 4 epochs by plain SGD, learning rate 0.3, on the cross entropy,
in batches of 20, in the order of the data. Keep an exponential moving average of the weights,
which starts as a copy of them: after each update it becomes 0.9 times itself plus 0.1 times
the weights.

Write weights.pt, the average at the end as a state dict of the net (torch.save), and
history.json with "val_loss": a list of the average's mean loss on the validation data after
each epoch.
"""
WRONG = ("callbacks=[EMA(0.9)]", "callbacks=[]")


def give(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(), classes(50, seed=1)
    write(folder, mlp(), x=x, y=y, val_x=val_x, val_y=val_y)


def check(folder: Path) -> None:
    net = mlp()
    average = copy.deepcopy(net)
    val_x, val_y = classes(50, seed=1)
    losses: list[float] = []

    @torch.no_grad()
    def follow() -> None:
        for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * weight)

    def validate() -> None:
        losses.append(F.cross_entropy(average(val_x), val_y).item())

    train(
        net, *classes(), batch=20, epochs=4, rate=0.3, after_step=follow,
        after_epoch=validate,
    )  # fmt: skip
    same_weights(read_weights(folder), average)
    near(read_json(folder, "history.json")["val_loss"], losses, "val_loss")
