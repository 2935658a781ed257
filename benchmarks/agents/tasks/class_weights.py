"""Weigh classes in the loss."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train for 4 epochs by plain SGD, learning rate 0.1, in
batches of 20, in the order of the data. The loss is the cross entropy, with class weights as
Keras's fit has them: each sample's loss is multiplied by the weight of its class (0.5 for
class 0, 1 for class 1, 4 for class 2), and the sum is divided by the number of samples.

Write weights.pt, the trained net's state dict (torch.save).
"""
ASKED = "keras-team/keras#4735"
WRONG = (
    '"cross_entropy"',
    "nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1, 4]))",
)
WEIGHTS = torch.tensor([0.5, 1.0, 4.0])


def weighed(logits: Tensor, target: Tensor) -> Tensor:
    return (F.cross_entropy(logits, target, reduction="none") * WEIGHTS[target]).mean()


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    net = train(mlp(), *classes(), batch=20, epochs=4, loss=weighed)
    same_weights(read_weights(folder), net)
