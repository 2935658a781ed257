"""Train on sequences of uneven lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.agents.arithmetic import near, read_array, read_weights, same_weights, write

PROMPT = """
data.npz has 60 sequences of tokens (numbers from 1 to 29) in one array tokens, one after the
other. lengths (60,) says how long each is, and labels (60,) has its class, 0 or 1. The net is
embedding = Embedding(30, 12), the mean of the embeddings over a sequence's own tokens, and
head = Linear(12, 2), which gives logits. start.pt is the state dict of a module with the
attributes embedding and head; begin with it. Train for 5 epochs by plain SGD, learning rate
0.5, on the cross entropy, in batches of 12 sequences, in the order of the data. How a batch
is padded must not matter.

Write weights.pt, the trained net's state dict (torch.save), and logits.npy (60, 2): the
trained net's logits for each sequence, in their order.
"""
WRONG = ("total / lengths[:, None]", "total / tokens.shape[1]")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 12), nn.Linear(12, 2)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        means = [self.embedding(sequence).mean(0) for sequence in sequences]
        return self.head(torch.stack(means))


def start() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        return Net()


def made() -> tuple[list[Tensor], Tensor]:
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=60)
    sequences = [
        torch.from_numpy(rng.integers(1 + 8 * label, 21 + 8 * label + label, size=length))
        for label, length in zip(labels, rng.integers(1, 25, size=60), strict=True)
    ]
    return sequences, torch.from_numpy(labels)


def give(folder: Path) -> None:
    sequences, labels = made()
    lengths = [len(sequence) for sequence in sequences]
    write(folder, start(), tokens=torch.cat(sequences), lengths=lengths, labels=labels)


def check(folder: Path) -> None:
    (sequences, labels), net = made(), start()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(5):
        for first in range(0, 60, 12):
            optimizer.zero_grad()
            rows = slice(first, first + 12)
            F.cross_entropy(net(sequences[rows]), labels[rows]).backward()
            optimizer.step()
    same_weights(read_weights(folder), net)
    with torch.no_grad():
        near(read_array(folder, "logits.npy"), net(sequences), "logits.npy")
