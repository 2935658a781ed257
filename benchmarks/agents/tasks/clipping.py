"""Clip the gradients' norm."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from benchmarks.agents.arithmetic import (
    mlp,
    numbers,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (80, 8) and y (80, 1), float32. The net is Linear(8, 16), ReLU, Linear(16, 1).
start.pt is the state dict of its torch Sequential; begin with these weights. Train for 4
epochs by plain SGD, learning rate 0.1, on the mean squared error, in batches of 20, in the
order of the data. Before each update the gradients of all parameters together are scaled down
so that their Euclidean norm is at most 0.5.

Write weights.pt, the trained net's state dict (torch.save).
"""
WRONG = ("gradient_clip_val=0.5", 'gradient_clip_val=0.5, gradient_clip_algorithm="value"')


def give(folder: Path) -> None:
    x, y = numbers(80)
    write(folder, mlp(1), x=x, y=y)


def check(folder: Path) -> None:
    net = mlp(1)
    train(
        net, *numbers(80), batch=20, epochs=4, loss=nn.functional.mse_loss,
        before_step=lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.5),
    )  # fmt: skip
    same_weights(read_weights(folder), net)
