"""Leave labels out that don't count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.agents.arithmetic import (
    mlp,
    near,
    read_json,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (64, 10, 8), float32: 64 sequences of 10 places. labels (64, 10) has a class
number from 0 to 2 for each place, or -100 where the place doesn't count. How many count
differs much from sequence to sequence. test_x (40, 10, 8) and test_labels (40, 10) are of the
same kind. The net is Linear(8, 16), ReLU, Linear(16, 3), at each place, and gives logits.
start.pt is the state dict of its torch Sequential; begin with these weights.

Train for 3 epochs by plain SGD, learning rate 0.2, in the order of the data. Each update sees
16 sequences, but memory holds only 4 at a time: accumulate gradients over 4 batches of 4. The
loss of an update is the mean of the cross entropy over all places of its 16 sequences that
count. Then evaluate on the test data in batches of 4.

Write weights.pt, the trained net's state dict (torch.save), and result.json with "loss" and
"accuracy": means over all places of the test data that count.
"""
ASKED = "huggingface/transformers#24725"
WRONG = ('labels = data["labels"]', 'labels = data["labels"].clip(0)')


def made(sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sequences, 10, 8)).astype("float32")
    labels = (x[..., :3] + x[..., 3:6]).argmax(-1)
    counted = rng.integers(1, 11, size=sequences)
    labels[np.arange(10) >= counted[:, None]] = -100
    return torch.from_numpy(x), torch.from_numpy(labels)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def give(folder: Path) -> None:
    (x, labels), (test_x, test_labels) = made(64, 0), made(40, 1)
    write(folder, mlp(), x=x, labels=labels, test_x=test_x, test_labels=test_labels)


def check(folder: Path) -> None:
    net = train(mlp(), *made(64, 0), batch=16, epochs=3, rate=0.2, loss=loss)
    same_weights(read_weights(folder), net)
    x, labels = made(40, 1)
    logits, counts = net(x), labels != -100
    result = read_json(folder, "result.json")
    near(result["loss"], loss(logits, labels).item(), "loss")
    right = logits.argmax(-1)[counts] == labels[counts]
    near(result["accuracy"], right.float().mean(), "accuracy")
