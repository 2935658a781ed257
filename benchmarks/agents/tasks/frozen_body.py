"""Train the head of a net first, then all of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, read_weights, same_weights, write

PROMPT = """
data.npz has x (96, 8), float32, and y (96,), class numbers from 0 to 2. The net has a body,
torch's Sequential of Linear(8, 16), BatchNorm1d(16), ReLU, and a head, Linear(16, 3), on what
the body gives; the head gives logits. start.pt is the state dict of a module with the
attributes body and head; begin with it. The loss is the cross entropy. Batches are of 24, in
the order of the data.

First train only the head: 3 epochs by plain SGD, learning rate 0.2. The body computes as in
evaluation, and nothing of it changes, its running statistics included. Write head.pt, the
state dict of the whole net after that. Then train the whole net: 3 epochs by plain SGD,
learning rate 0.05, with the body in training mode again. Write weights.pt, the state dict at
the end. Both are written by torch.save.
"""
ASKED = "Lightning-AI/pytorch-lightning#15062"
WRONG = ("net.body.requires_grad_(False).eval()", "net.body.requires_grad_(False)")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def start() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


def give(folder: Path) -> None:
    x, y = classes(96)
    write(folder, start(), x=x, y=y)


def check(folder: Path) -> None:
    (x, y), net = classes(96), start()

    def epochs(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            for first in range(0, 96, 24):
                optimizer.zero_grad()
                F.cross_entropy(net(x[first : first + 24]), y[first : first + 24]).backward()
                optimizer.step()

    net.body.eval()
    epochs(torch.optim.SGD(net.head.parameters(), 0.2))
    same_weights(read_weights(folder, "head.pt"), net, "head.pt")
    net.body.train()
    epochs(torch.optim.SGD(net.parameters(), 0.05))
    same_weights(read_weights(folder), net)
