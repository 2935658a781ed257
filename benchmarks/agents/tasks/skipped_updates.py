"""Leave out updates whose loss isn't finite, and say which."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import mlp, numbers, read_json, read_weights, same_weights, write

PROMPT = """
data.npz has x (120, 8) and y (120, 1), float32. Some rows are broken: they have NaN or infinite
entries, and nobody knows which. The net is Linear(8, 16), ReLU, Linear(16, 1). start.pt is the
state dict of its torch Sequential; begin with these weights. Train it for 3 epochs by Adam
(torch's defaults, but a learning rate of 0.01) on the mean squared error, in batches of 8, in
the order of the data, two batches for each update: an update has the mean of its 16 samples'
losses.

An update in which the loss of a batch isn't finite is left out as a whole, both of its batches:
the weights and Adam's state are as if it had not been there. Don't repair or drop single rows.

Write weights.pt, the trained net's state dict (torch.save), and result.json with "skipped": how
many updates were left out in each epoch, a list of 3 numbers, and "samples": the rows of x,
counted from 0, of the batches of 8 whose loss isn't finite in the first epoch, in rising order.
"""
ASKED = "facebookresearch/mmf#1073"
WRONG = ("data = np.load", "np.load = lambda *a, f=np.load: {k: np.nan_to_num(v, posinf=0) for k, "
         "v in f(*a).items()}\ndata = np.load")  # fmt: skip
BROKEN = ((37, 5, float("nan")), (85, 0, float("inf")))
"""Rows, columns and their entries."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = numbers(120)
    for row, column, entry in BROKEN:
        x[row, column] = entry
    return x, y


def give(folder: Path) -> None:
    x, y = data()
    write(folder, mlp(1), x=x, y=y)


def check(folder: Path) -> None:
    (x, y), net = data(), mlp(1)
    adam = torch.optim.Adam(net.parameters(), 0.01)
    skipped: list[int] = []
    samples: list[int] = []
    for epoch in range(3):
        skipped.append(0)
        for first in range(0, 120, 16):
            adam.zero_grad()
            loss = F.mse_loss(net(x[first : first + 16]), y[first : first + 16])
            if loss.isfinite():
                loss.backward()
                adam.step()
                continue
            skipped[-1] += 1
            for at in (first, first + 8):
                loss = F.mse_loss(net(x[at : at + 8]), y[at : at + 8])
                if not epoch and not loss.isfinite():
                    samples += range(at, at + 8)
    same_weights(read_weights(folder), net)
    found = read_json(folder, "result.json")
    assert found["skipped"] == skipped, f"skipped is {found['skipped']}, not {skipped}"
    assert found["samples"] == samples, f"samples is {found['samples']}, not {samples}"
