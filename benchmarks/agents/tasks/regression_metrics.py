"""Report a regression's errors over a whole set."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.agents.arithmetic import near, numbers, read_array, read_json, write

PROMPT = """
data.npz has x (200, 8) and y (200, 1), and test_x (50, 8) and test_y (50, 1), float32. Train
a net of your choice to predict y. Evaluate it on the test data in batches of 7.

Write predictions.npy (50, 1), the net's predictions of the test rows, and result.json with
the numbers of all 50 together: "mae", the mean absolute error; "rmse", the root of the mean
squared error; and "r2", the coefficient of determination. r2 must be at least 0.6.
"""
ASKED = "Lightning-AI/pytorch-lightning#2265"
MEAN_OF_ROOTS = """\
def rmse(prediction, target):
    return (prediction - target).square().mean().sqrt()


model.compile("adam", "mse", metrics=["mae", rmse, "r2"]"""
WRONG = ('model.compile("adam", "mse", metrics=["mae", "rmse", "r2"]', MEAN_OF_ROOTS)


def give(folder: Path) -> None:
    (x, y), (test_x, test_y) = numbers(200), numbers(50, seed=1)
    write(folder, x=x, y=y, test_x=test_x, test_y=test_y)


def check(folder: Path) -> None:
    y = np.asarray(numbers(50, seed=1)[1], dtype=float)
    found = read_array(folder, "predictions.npy").astype(float)
    assert found.shape == y.shape, f"predictions.npy has shape {found.shape}"
    result, error = read_json(folder, "result.json"), y - found
    r2 = 1 - np.square(error).sum() / np.square(y - y.mean()).sum()
    assert r2 >= 0.6, f"r2 is {r2:.3f}"
    near(result["r2"], r2, "r2")
    near(result["mae"], np.abs(error).mean(), "mae")
    near(result["rmse"], np.sqrt(np.square(error).mean()), "rmse")
