"""Train with a loss and a metric of one's own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.agents.arithmetic import (
    mlp,
    near,
    numbers,
    read_json,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (80, 8), y (80, 1), test_x (50, 8) and test_y (50, 1), float32. The net is
Linear(8, 16), ReLU, Linear(16, 1). start.pt is the state dict of its torch Sequential; begin
with these weights. It is to predict a quantile: the loss of a sample is 0.9 e where
e = y - net(x) is positive, and -0.1 e elsewhere. Train on the mean of it for 4 epochs by
plain SGD, learning rate 0.1, in batches of 20, in the order of the data.

Then evaluate on the test data in batches of 16. Write weights.pt, the trained net's state
dict (torch.save), and result.json with "loss", that mean loss over the 50 test samples, and
"covered", the share of them whose y isn't above the net's prediction.
"""
WRONG = ("error = target - prediction", "error = prediction - target")


def pinball(prediction: Tensor, target: Tensor) -> Tensor:
    error = target - prediction
    return torch.where(error > 0, 0.9 * error, -0.1 * error).mean()


def give(folder: Path) -> None:
    (x, y), (test_x, test_y) = numbers(80), numbers(50, seed=1)
    write(folder, mlp(1), x=x, y=y, test_x=test_x, test_y=test_y)


def check(folder: Path) -> None:
    net = train(mlp(1), *numbers(80), batch=20, epochs=4, loss=pinball)
    same_weights(read_weights(folder), net)
    x, y = numbers(50, seed=1)
    result = read_json(folder, "result.json")
    near(result["loss"], pinball(net(x), y).item(), "loss")
    near(result["covered"], (y <= net(x)).float().mean(), "covered")
