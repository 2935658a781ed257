"""Accumulate gradients over batches, with a short last group."""

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
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Memory holds only 8 samples at a time, but an update is
to see 32: train by plain SGD, learning rate 0.1, on the cross entropy for 3 epochs, in
batches of 8, in the order of the data, with an update after every fourth batch. The last
update of an epoch sees the 4 samples that are left. Each update uses the mean over all
samples that it sees.

Write weights.pt, the trained net's state dict (torch.save), and result.json with "updates",
how many updates there were in all.
"""
ASKED = "Lightning-AI/pytorch-lightning#19987"
WRONG = ("accumulate_grad_batches=4", "accumulate_grad_batches=2")


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    net = train(mlp(), *classes(), batch=32, epochs=3)
    same_weights(read_weights(folder), net)
    near(read_json(folder, "result.json")["updates"], 12, "updates", 0)
