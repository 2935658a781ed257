"""Train on two processes and get the numbers of one."""

from __future__ import annotations

from pathlib import Path

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
data.npz has x (120, 8), float32, and y (120,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train it on two processes of this machine's CPU for 3
epochs by plain SGD, learning rate 0.1, on the cross entropy, in the order of the data. Each
update is made of 24 samples in all, 12 on each process.

Write weights.pt, the trained net's state dict (torch.save), and result.json with "processes",
how many processes trained, and "accuracy", the share of the 120 samples that the trained net
classifies rightly.
"""
ALONE = True
SECONDS = 120
WRONG = ("batch_size=12, epochs", "batch_size=24, epochs")


def give(folder: Path) -> None:
    x, y = classes(120)
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    x, y = classes(120)
    net = train(mlp(), x, y, batch=24, epochs=3)
    same_weights(read_weights(folder), net)
    result = read_json(folder, "result.json")
    assert result["processes"] == 2, f"{result['processes']} processes"
    near(result["accuracy"], (net(x).argmax(1) == y).float().mean(), "accuracy")
