"""Warm the learning rate up, then let it fall with each update."""

from __future__ import annotations

import math
from pathlib import Path

import torch

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
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train for 6 epochs by plain SGD on the cross entropy, in
batches of 20, in the order of the data: 30 updates. The learning rate of update t (from 0) is
0.2 (t + 1) / 6 for the first 6 updates, and 0.1 (1 + cos(pi (t - 6) / 24)) from then on.

Write weights.pt, the trained net's state dict (torch.save), and rates.json: a list of the 30
learning rates that the updates were made with.
"""
WRONG = ('"interval": "step"', '"interval": "epoch"')


def factor(t: int) -> float:
    return (t + 1) / 6 if t < 6 else 0.5 * (1 + math.cos(math.pi * (t - 6) / 24))


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    net = mlp()
    sgd = torch.optim.SGD(net.parameters(), 0.2)
    rates: list[float] = []

    def set_rate() -> None:
        rates.append(0.2 * factor(len(rates)))
        sgd.param_groups[0]["lr"] = rates[-1]

    train(net, *classes(), batch=20, epochs=6, optimizer=sgd, before_step=set_rate)
    near(read_json(folder, "rates.json"), rates, "rates.json", 1e-6)
    same_weights(read_weights(folder), net)
