"""Compare trained models on one test set."""

from __future__ import annotations

from math import comb
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.agents.arithmetic import classes, mlp, near, read_json, train, write

PROMPT = """
data.npz has test data: x (300, 8), float32, and y (300,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. old.pt, new.pt and large.pt are state dicts
of its torch Sequential, of three trainings. Load the weights, don't train.

Is new more often right than old? Is large more often right than old? Two models that answer the
same samples are compared by McNemar's exact test, two-sided, at a level of 5 %. Write new.json
and large.json, each with "better": "old", or "new" or "large", or null if the test finds no
difference, "p": the test's p-value, and "difference": the other's accuracy minus that of old.
"""
WRONG = ("found.better and names[found.better]", "names['ab'[found.difference > 0]]")
EPOCHS = {"old": 2, "new": 3, "large": 40}


def trained(name: str) -> nn.Module:
    return train(mlp(), *classes(), batch=10, epochs=EPOCHS[name], rate=0.05)


def give(folder: Path) -> None:
    x, y = classes(300, seed=1)
    write(folder, x=x, y=y)
    for name in EPOCHS:
        torch.save(trained(name).state_dict(), folder / f"{name}.pt")


def check(folder: Path) -> None:
    (x, y), nets = classes(300, seed=1), {name: trained(name) for name in EPOCHS}
    with torch.no_grad():
        right = {name: (net(x).argmax(1) == y).numpy() for name, net in nets.items()}
    for name in ("new", "large"):
        gained = int((right[name] & ~right["old"]).sum())
        lost = int((~right[name] & right["old"]).sum())
        n = gained + lost
        tail = sum(comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
        p = min(1.0, 2 * tail)
        better = None if p >= 0.05 else name if gained > lost else "old"
        found = read_json(folder, f"{name}.json")
        assert found["better"] == better, f"{name}.json: {found['better']!r}, not {better!r}"
        near(found["p"], p, f"{name}.json: p", 1e-6)
        near(found["difference"], np.mean(right[name]) - np.mean(right["old"]), f"{name}.json")
