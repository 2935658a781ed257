"""Train a net with two inputs and two outputs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, read_weights, same_weights, write

PROMPT = """
data.npz has left (80, 5) and right (80, 3), float32, kind (80,), class numbers from 0 to 2,
and size (80, 1), float32. The net takes left and right, joins them to 8 columns (left first),
and has three parts: body = Linear(8, 16), then a ReLU; and on what that gives kind =
Linear(16, 3), logits, and size = Linear(16, 1), a number. start.pt is the state dict of a
module with these three linear layers as attributes body, kind and size; begin with it.

Train for 4 epochs by plain SGD, learning rate 0.05, in batches of 20, in the order of the
data. The loss is the cross entropy of kind, plus a quarter of the mean squared error of size.

Write weights.pt, the trained net's state dict (torch.save).
"""
WRONG = ('loss_weights={"size": 0.25},', "")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.kind, self.size = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.kind(hidden), self.size(hidden)


def start() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net()


def sizes(x: Tensor) -> Tensor:
    return 2 * x[:, :1] - x[:, 6:7]


def give(folder: Path) -> None:
    x, y = classes(80)
    write(folder, start(), left=x[:, :5], right=x[:, 5:], kind=y, size=sizes(x))


def check(folder: Path) -> None:
    (x, y), net = classes(80), start()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(4):
        for first in range(0, 80, 20):
            rows = slice(first, first + 20)
            kind, size = net(x[rows])
            loss = F.cross_entropy(kind, y[rows]) + F.mse_loss(size, sizes(x[rows])) / 4
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    same_weights(read_weights(folder), net)
