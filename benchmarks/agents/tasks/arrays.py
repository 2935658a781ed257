"""Train on arrays with a validation split."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, mlp, near, read_array, read_json, train, write

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train for 5 epochs by plain SGD with a learning rate of
0.1 on the cross entropy, in batches of 20, in the order of the data (never shuffled). The
last fifth of the data isn't trained on, but validates after each epoch.

Write history.json, a dict of lists with a number for each epoch: "loss" (the mean over the
training samples of the epoch, as they were trained on), "val_loss" and "val_accuracy". Write
predictions.npy: the trained net's class for each of the 100 rows, in their order.
"""
WRONG = ("shuffle=False, ", "")


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    (x, y), net = classes(), mlp()
    losses: list[float] = []
    right: dict[str, list[float]] = {"loss": [], "val_loss": [], "val_accuracy": []}

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(logits, target)
        losses.append(value.item())
        return value

    def validate() -> None:
        right["loss"].append(sum(losses[-4:]) / 4)
        logits = net(x[80:])
        right["val_loss"].append(F.cross_entropy(logits, y[80:]).item())
        right["val_accuracy"].append((logits.argmax(1) == y[80:]).float().mean().item())

    train(net, x[:80], y[:80], batch=20, epochs=5, loss=loss, after_epoch=validate)
    history = read_json(folder, "history.json")
    for name, values in right.items():
        near(history[name], values, name)
    classes_found = read_array(folder, "predictions.npy")
    near(classes_found, net(x).argmax(1), "predictions.npy", 0)
