"""Train a Keras network with its regularizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import near, numbers, write

PROMPT = """
data.npz has x (80, 8) and y (80, 1), float32, and the starting weights kernel_1 (8, 16),
bias_1 (16,), kernel_2 (16, 1) and bias_2 (1,). Build a Keras 3 network on Keras's torch
backend: Dense(16, relu), Dense(1). Both layers' kernels have the regularizer
keras.regularizers.L2(0.01), which adds 0.01 times the sum of the kernel's squares to the
loss. Set its weights to the given ones. Train it with fitkit for 4 epochs by plain SGD,
learning rate 0.05, on the mean squared error plus the regularizers' terms, in batches of 20,
in the order of the data.

Write weights.npz with the arrays kernel_1, bias_1, kernel_2 and bias_2 after the training.
"""
NEEDS = ("keras",)
WRONG = ("kernel_regularizer=keras.regularizers.L2(0.01)", "kernel_regularizer=None")
NAMES = ("kernel_1", "bias_1", "kernel_2", "bias_2")


def start() -> list[torch.Tensor]:
    rng = np.random.default_rng(7)
    shapes = [(8, 16), (16,), (16, 1), (1,)]
    return [torch.tensor(rng.normal(size=s) * 0.3, dtype=torch.float32) for s in shapes]


def give(folder: Path) -> None:
    x, y = numbers(80)
    weights: dict[str, Any] = dict(zip(NAMES, start(), strict=True))
    write(folder, x=x, y=y, **weights)


def check(folder: Path) -> None:
    (x, y), weights = numbers(80), [value.requires_grad_() for value in start()]
    for _ in range(4):
        for first in range(0, 80, 20):
            hidden = (x[first : first + 20] @ weights[0] + weights[1]).relu()
            loss = F.mse_loss(hidden @ weights[2] + weights[3], y[first : first + 20])
            loss = loss + 0.01 * (weights[0].square().sum() + weights[2].square().sum())
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for value, gradient in zip(weights, gradients, strict=True):
                    value -= 0.05 * gradient
    assert (folder / "weights.npz").is_file(), "there is no weights.npz"
    with np.load(folder / "weights.npz") as found:
        for name, right in zip(NAMES, weights, strict=True):
            near(found[name], right.detach(), name)
