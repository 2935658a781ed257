"""Train with a step of one's own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import (
    mlp,
    near,
    numbers,
    read_json,
    read_weights,
    same_weights,
    write,
)

PROMPT = """
data.npz has x (80, 8) and y (80, 1), float32. The net is Linear(8, 16), ReLU, Linear(16, 1).
start.pt is the state dict of its torch Sequential; begin with these weights. Train for 4
epochs by plain SGD, learning rate 0.02, in batches of 20, in the order of the data. The loss
of a batch is the mean squared error of net(x), plus 0.3 times a penalty: the mean, over the
batch, of the squares of net(x) - net(-x).

Write weights.pt, the trained net's state dict (torch.save), and history.json with "penalty":
a list with the mean of the penalty over the samples of each epoch, as they were trained on,
without the factor 0.3.
"""
WRONG = ("+ 0.3 * penalty", "")


def give(folder: Path) -> None:
    x, y = numbers(80)
    write(folder, mlp(1), x=x, y=y)


def check(folder: Path) -> None:
    (x, y), net = numbers(80), mlp(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    penalties = []
    for _ in range(4):
        for first in range(0, 80, 20):
            rows = x[first : first + 20]
            penalty = (net(rows) - net(-rows)).square().mean()
            loss = F.mse_loss(net(rows), y[first : first + 20]) + 0.3 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            penalties.append(penalty.item())
    same_weights(read_weights(folder), net)
    right = [sum(penalties[i : i + 4]) / 4 for i in range(0, 16, 4)]
    near(read_json(folder, "history.json")["penalty"], right, "penalty")
