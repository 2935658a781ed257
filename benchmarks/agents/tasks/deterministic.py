"""Make a training that can be repeated bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import classes, read_weights, write

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. Write a function
that makes and trains a net from nothing but these data and a seed: Linear(8, 32), ReLU,
Dropout(0.5), Linear(32, 3), with torch's random starting weights; 3 epochs by Adam (torch's
defaults) on the cross entropy, in batches of 10, shuffled in each epoch. The same seed must
give the same bits.

Call it with the seeds 1, 1 and 2, in this order, and write the state dicts (torch.save) to
first.pt, again.pt and other.pt.
"""
WRONG = ("fitkit.set_seed(seed)", "pass")


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, x=x, y=y)


def check(folder: Path) -> None:
    first, again, other = (
        read_weights(folder, f"{name}.pt") for name in ("first", "again", "other")
    )
    shapes = [tuple(value.shape) for value in first.values()]
    assert shapes == [(32, 8), (32,), (3, 32), (3,)], f"the weights' shapes are {shapes}"
    for name, value in first.items():
        assert torch.equal(value, again[name]), f"{name} isn't the same with the same seed"
        assert not torch.equal(value, other[name]), f"{name} is the same with another seed"
    x, y = classes()
    hidden = (x @ first["0.weight"].T + first["0.bias"]).relu()
    logits = hidden @ first["3.weight"].T + first["3.bias"]
    loss = torch.nn.functional.cross_entropy(logits, y)
    assert loss < 1.05, f"the net hardly learned: its loss is {loss:.2f}"
