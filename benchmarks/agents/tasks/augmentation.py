"""Augment alike with any number of loader workers, by a library with a generator of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import classes, mlp, read_weights, train, write

PROMPT = """
data.npz has x (96, 8), float32, and y (96,), class numbers from 0 to 2. noise.py is a library
that you can't change: noise.noisy(row) returns a row of x with noise, from a generator of its
own, which noise.seed(integer) seeds. The net is Linear(8, 16), ReLU, Linear(16, 3), and gives
logits. start.pt is the state dict of its torch Sequential; begin each training with these
weights. A training is 3 epochs by plain SGD, learning rate 0.1, on the cross entropy, in
batches of 16, in the order of the data, by a DataLoader whose data set calls noise.noisy for
each sample that it reads.

The noise follows from the training's seed and from nothing else: the same seed gives the same
bits with any number of loader workers, and another seed gives other noise. Samples differ in
their noise, and so do the epochs of one sample.

Train with seed 1 and no loader workers, with seed 1 and 2 workers, and with seed 2 and no
workers. Write the trained nets' state dicts (torch.save) to none.pt, two.pt and other.pt.
"""
ASKED = "pytorch/pytorch#5059"
WRONG = ("noise.seed(fitkit.data.sample_seed())", "noise.seed(index)")
LIBRARY = """\
import random

GENERATOR = random.Random(0)


def seed(number):
    GENERATOR.seed(number)


def noisy(row):
    return (row + [GENERATOR.gauss(0, 0.5) for _ in row]).astype(row.dtype)
"""


def give(folder: Path) -> None:
    x, y = classes(96)
    write(folder, mlp(), x=x, y=y)
    (folder / "noise.py").write_text(LIBRARY)


def check(folder: Path) -> None:
    none, two, other = (read_weights(folder, f"{name}.pt") for name in ("none", "two", "other"))
    plain = train(mlp(), *classes(96), batch=16, epochs=3).state_dict()
    assert none.keys() == plain.keys(), f"none.pt has the names {sorted(none)}"
    for name, value in none.items():
        assert torch.equal(value, two[name]), f"{name} depends on the number of workers"
        assert not torch.equal(value, other[name]), f"{name} is the same with another seed"
        off = (value - plain[name]).abs().max().item()
        assert off > 1e-4, f"{name} is that of a training without noise"
        assert off < 0.2, f"{name} is {off:.2f} off a training without noise: too far"
