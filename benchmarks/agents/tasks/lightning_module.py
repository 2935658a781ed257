"""Train a LightningModule as it is."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    near,
    read_json,
    read_weights,
    same_weights,
    write,
)

PROMPT = """
classifier.py defines Classifier, a LightningModule with its steps, its optimizer and its
schedule of the learning rate. Use it as it is. data.npz has x (80, 8) and y (80,) to train
on, and val_x (50, 8) and val_y (50,) to validate with: float32 inputs and class numbers from
0 to 2. start.pt is the state dict of a Classifier; begin with it. Train it with fitkit for 4
epochs, in batches of 20, in the order of the data, with the validation after each epoch in
batches of 20, too.

Write weights.pt, the trained module's state dict (torch.save), and history.json with
"val_accuracy": a list of what the module logs by this name in each epoch.
"""
NEEDS = ("lightning",)
WRONG = ("model.compile()", 'model.compile("sgd", learning_rate=0.2)')
MODULE = """
import lightning
import torch
from torch.nn import functional as F


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, label_smoothing=0.1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("val_accuracy", right, batch_size=len(y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": halved}
"""


class Start(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


def give(folder: Path) -> None:
    (x, y), (val_x, val_y) = classes(80), classes(50, seed=1)
    write(folder, Start(), x=x, y=y, val_x=val_x, val_y=val_y)
    (folder / "classifier.py").write_text(textwrap.dedent(MODULE).lstrip())


def check(folder: Path) -> None:
    (x, y), (val_x, val_y), module = classes(80), classes(50, seed=1), Start()
    optimizer = torch.optim.SGD(module.parameters(), 0.2, momentum=0.9)
    accuracies = []
    for epoch in range(4):
        optimizer.param_groups[0]["lr"] = 0.2 * 0.5**epoch
        for first in range(0, 80, 20):
            rows = slice(first, first + 20)
            optimizer.zero_grad()
            F.cross_entropy(module.net(x[rows]), y[rows], label_smoothing=0.1).backward()
            optimizer.step()
        accuracies.append((module.net(val_x).argmax(1) == val_y).float().mean().item())
    same_weights(read_weights(folder), module)
    near(read_json(folder, "history.json")["val_accuracy"], accuracies, "val_accuracy")
