"""Say how exact an accuracy and a loss are."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, mlp, near, read_json, train, write

PROMPT = """
data.npz has x (300, 8), float32, and y (300,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. trained.pt is the state dict of its torch
Sequential. Load these weights, don't train.

Evaluate it on these data, and say how exact the values are: give intervals that hold the values
for all data of the kind with 90 % confidence. Write result.json with "accuracy", the share of
right answers, and "accuracy_interval", Wilson's interval of it; and with "loss", the mean cross
entropy, and "loss_interval", that of Student's t. An interval is a list of two numbers.
"""
WRONG = ("interval=0.9,", "interval=0.95,")


def give(folder: Path) -> None:
    x, y = classes(300, seed=1)
    write(folder, x=x, y=y)
    torch.save(train(mlp(), *classes(), batch=10, epochs=5).state_dict(), folder / "trained.pt")


def check(folder: Path) -> None:
    (x, y), net = classes(300, seed=1), train(mlp(), *classes(), batch=10, epochs=5)
    with torch.no_grad():
        logits = net(x)
    losses = F.cross_entropy(logits, y, reduction="none").double().numpy()
    share, n = (logits.argmax(1) == y).double().mean().item(), len(y)
    z = NormalDist().inv_cdf(0.95)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    t = 1.649966  # the quantile 0.95 for 299 degrees of freedom
    spread = t * losses.std(ddof=1) / np.sqrt(n)
    found = read_json(folder, "result.json")
    near(found["accuracy"], share, "accuracy")
    near(found["accuracy_interval"], [middle - half, middle + half], "accuracy_interval")
    near(found["loss"], losses.mean(), "loss")
    near(found["loss_interval"], [losses.mean() - spread, losses.mean() + spread], "loss_interval")
