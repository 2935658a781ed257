"""Learn from a larger net's outputs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.agents.arithmetic import classes, mlp, read_weights, same_weights, write

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The teacher is
Linear(8, 64), ReLU, Linear(64, 3); teacher.pt is the state dict of its torch Sequential. The
student is Linear(8, 16), ReLU, Linear(16, 3); start.pt is its state dict, begin with it. Both
give logits. Train the student for 4 epochs by plain SGD, learning rate 0.1, in batches of 20,
in the order of the data. The teacher doesn't change. The loss of a batch is 0.3 times the
cross entropy with y, plus 0.7 times 4 * 4 times the mean over the samples of
KL(softmax(teacher / 4) || softmax(student / 4)), summed over the classes.

Write weights.pt, the trained student's state dict (torch.save).
"""
WRONG = ("alpha=0.3", "alpha=0.7")


def teacher() -> torch.nn.Sequential:
    return mlp(hidden=64, seed=21)


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)
    torch.save(teacher().state_dict(), folder / "teacher.pt")


def check(folder: Path) -> None:
    (x, y), net, large = classes(), mlp(), teacher()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss(rows: slice) -> Tensor:
        logits = net(x[rows])
        soft = (large(x[rows]).detach() / 4).softmax(1)
        divergence = (soft * (soft.log() - (logits / 4).log_softmax(1))).sum(1).mean()
        return 0.3 * F.cross_entropy(logits, y[rows]) + 0.7 * 16 * divergence

    for _ in range(4):
        for first in range(0, 100, 20):
            optimizer.zero_grad()
            loss(slice(first, first + 20)).backward()
            optimizer.step()
    same_weights(read_weights(folder), net)
