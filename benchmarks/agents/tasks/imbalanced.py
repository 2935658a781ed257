"""Find a rare class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.agents.arithmetic import read_array, write

PROMPT = """
data.npz has x (2000, 6), float32, and y (2000,), 0 or 1: some three in a hundred are 1. It
has test_x (2000, 6) of the same kind, without labels. Train a small net of your choice that
finds the ones. Write predictions.npy: 0 or 1 for each test row, in their order.

The recall (the share of the ones that are found) and the specificity (the share of the zeros
that are called 0) must both be at least 0.75 on the test rows.
"""
WRONG = ("class_weight={0: 1.0, 1: float((y == 0).sum() / (y == 1).sum())},", "")


def made(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = (rng.random(2000) < 0.03).astype("int64")
    x = rng.normal(size=(2000, 6)) + 1.1 * y[:, None] * np.array([1, 1, -1, 0, 0, 0.5])
    return x.astype("float32"), y


def give(folder: Path) -> None:
    x, y = made(0)
    write(folder, x=x, y=y, test_x=made(1)[0])


def check(folder: Path) -> None:
    y, found = made(1)[1], read_array(folder, "predictions.npy")
    assert found.shape == (2000,), f"predictions.npy has shape {found.shape}"
    recall, specificity = (found[y == 1] == 1).mean(), (found[y == 0] == 0).mean()
    assert recall >= 0.75, f"recall {recall:.2f}"
    assert specificity >= 0.75, f"specificity {specificity:.2f}"
