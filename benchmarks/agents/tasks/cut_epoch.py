"""Go on with a training that was cut within an epoch, with the same augmentations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.agents.arithmetic import classes, mlp, read_weights, train, write

PROMPT = """
data.npz has x (96, 8), float32, and y (96,), class numbers from 0 to 2. augment.py has the
function noisy(row), which returns a row of x with noise from NumPy's global generator, and
writes a line with the noise's sum to draws.txt: leave that file where it is. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. The training is 4 epochs by Adam (torch's defaults, but a
learning rate of 0.01) on the cross entropy, in batches of 16, shuffled in each epoch, by a
DataLoader whose data set calls noisy for each sample that it reads, in the main process. Its
seed is 7.

Do this training twice. The first time it runs at a stretch. The second time it is cut after
9 updates, in the middle of the second epoch, where all that a continuation needs is saved to a
file. Another model with random weights, a new optimizer and a new DataLoader, which know
nothing but that file, do the rest: 15 updates, on the samples that the second epoch had left
and on those of two more epochs. The result is that of the first time, bit for bit: the same
order, the same noise.

Write whole.pt and resumed.pt, the state dicts (torch.save) of the trained nets.
"""
ASKED = "Lightning-AI/pytorch-lightning#18780"
WRONG = ('resume_from="cut.h5"', "initial_epoch=1")
AUGMENT = """\
import numpy as np


def noisy(row):
    noise = np.random.normal(size=row.shape).astype(row.dtype) * 0.5
    with open("draws.txt", "a") as file:
        print(float(noise.sum()), file=file)
    return row + noise
"""


def give(folder: Path) -> None:
    x, y = classes(96)
    write(folder, mlp(), x=x, y=y)
    (folder / "augment.py").write_text(AUGMENT)


def check(folder: Path) -> None:
    whole, resumed = read_weights(folder, "whole.pt"), read_weights(folder, "resumed.pt")
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), f"{name} isn't that of a training at a stretch"
    net = mlp()
    adam = torch.optim.Adam(net.parameters(), 0.01)
    plain = train(net, *classes(96), batch=16, epochs=4, optimizer=adam).state_dict()
    assert whole.keys() == plain.keys(), f"whole.pt has the names {sorted(whole)}"
    off = max((value - plain[name]).abs().max().item() for name, value in whole.items())
    assert 0.01 < off < 0.5, f"whole.pt is {off:.2g} off a training without noise and shuffling"
    draws = np.loadtxt(folder / "draws.txt")
    first, rest = draws[: 4 * 96], draws[-15 * 16 :]
    assert len(set(first)) == 4 * 96, "samples or epochs have the same noise"
    assert len(draws) >= 4 * 96 + 9 * 16 + 15 * 16, f"{len(draws)} samples were read"
    assert len(draws) <= 2 * 4 * 96 + 3 * 16, f"{len(draws)} samples were read: too many"
    assert (draws[4 * 96 : 4 * 96 + 9 * 16] == first[: 9 * 16]).all(), "the cut part drew others"
    assert (rest == first[9 * 16 :]).all(), "the rest drew others than the training at a stretch"
