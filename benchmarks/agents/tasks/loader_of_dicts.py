"""Train on a DataLoader whose batches are dicts."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    near,
    read_json,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has signal (90, 8), kind (90,), test_signal (50, 8) and test_kind (50,): float32
inputs and class numbers from 0 to 2. Write a torch Dataset whose samples are dicts with the
entries "signal" and "kind", and read it by DataLoaders in batches of 16, in order. The last
batches are short, and are used like the others.

The net is Linear(8, 16), ReLU, Linear(16, 3), and gives logits for a "signal". start.pt is the
state dict of its torch Sequential; begin with these weights. Train for 3 epochs by plain SGD,
learning rate 0.1, on the cross entropy with "kind". Then evaluate on the test data, in batches
of 16 too.

Write weights.pt, the trained net's state dict (torch.save), and result.json with "loss" and
"accuracy": the means over the 50 test samples.
"""
ASKED = "Lightning-AI/pytorch-lightning#3668, #2924"
WRONG = ('DataLoader(Signals("test_"), 16)', 'DataLoader(Signals("test_"), 16, drop_last=True)')


def give(folder: Path) -> None:
    (x, y), (test_x, test_y) = classes(90), classes(50, seed=1)
    write(folder, mlp(), signal=x, kind=y, test_signal=test_x, test_kind=test_y)


def check(folder: Path) -> None:
    net = train(mlp(), *classes(90), batch=16, epochs=3)
    same_weights(read_weights(folder), net)
    x, y = classes(50, seed=1)
    logits = net(x)
    result = read_json(folder, "result.json")
    near(result["loss"], torch.nn.functional.cross_entropy(logits, y).item(), "loss")
    near(result["accuracy"], (logits.argmax(1) == y).float().mean(), "accuracy")
