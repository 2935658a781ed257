"""Give a sample several labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.agents.arithmetic import near, read_array, read_json, write

PROMPT = """
data.npz has x (400, 8), float32, and y (400, 4), 0 or 1: each of four labels may hold for a
sample, or not. test_x (150, 8) and test_y (150, 4) are of the same kind. Train a net of your
choice. Write probabilities.npy (150, 4): how probable the net finds each label of each test
row. Write result.json with "f1_macro": the mean over the four labels of the F1 score of each
on all 150 test rows, where a label is predicted if its probability is above 0.5. Compute it
by evaluating in batches of 16. It must be at least 0.8.
"""
ASKED = "Lightning-AI/torchmetrics#845"
WRONG = ('average="macro"', 'average="micro"')


def made(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 8))
    score = x[:, :4] + 0.5 * x[:, 4:] - np.array([0, 0.4, 0.8, 1.2])
    return x.astype("float32"), (score > 0).astype("int64")


def give(folder: Path) -> None:
    (x, y), (test_x, test_y) = made(400, 0), made(150, 1)
    write(folder, x=x, y=y, test_x=test_x, test_y=test_y)


def check(folder: Path) -> None:
    y, found = made(150, 1)[1] == 1, read_array(folder, "probabilities.npy")
    assert found.shape == y.shape, f"probabilities.npy has shape {found.shape}"
    assert found.min() >= 0 and found.max() <= 1, "probabilities.npy has no probabilities"
    predicted = found > 0.5
    hits = (predicted & y).sum(0)
    right = (2 * hits / (predicted.sum(0) + y.sum(0))).mean()
    assert right >= 0.8, f"the F1 score is {right:.3f}"
    near(read_json(folder, "result.json")["f1_macro"], right, "f1_macro", 1e-3)
