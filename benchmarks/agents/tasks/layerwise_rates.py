"""Train layers at rates of their own."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train for 4 epochs by AdamW on the cross entropy, in
batches of 20, in the order of the data. The first linear layer has a learning rate of 0.001
and no weight decay, the second a rate of 0.02 and a weight decay of 0.1. All else is torch's
default.

Write weights.pt, the trained net's state dict (torch.save).
"""
WRONG = ('"lr": 0.001, "weight_decay": 0.0', '"lr": 0.02')


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    net = mlp()
    slow = {"params": list(net[0].parameters()), "lr": 0.001, "weight_decay": 0.0}
    fast = {"params": list(net[2].parameters()), "lr": 0.02, "weight_decay": 0.1}
    adam = torch.optim.AdamW([slow, fast])
    train(net, *classes(), batch=20, epochs=4, optimizer=adam)
    same_weights(read_weights(folder), net)
