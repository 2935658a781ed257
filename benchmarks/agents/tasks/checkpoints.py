"""Save a checkpoint every few updates."""

from __future__ import annotations

import copy
from pathlib import Path

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (120, 8), float32, and y (120,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train for 5 epochs by plain SGD, learning rate 0.1, on
the cross entropy, in batches of 20, in the order of the data: 30 updates.

After every 10 updates save the net's state dict to step-10.pt, step-20.pt and so on, so that
torch.load(path, weights_only=True) reads it. There is no such file for other updates.
"""
ASKED = "tensorflow/tensorflow#37118"
WRONG = ("every_n_train_steps=10", "every_n_epochs=2")


def give(folder: Path) -> None:
    x, y = classes(120)
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    found = sorted(path.name for path in folder.glob("step-*"))
    names = ["step-10.pt", "step-20.pt", "step-30.pt"]
    assert found == names, f"the files are {found}"
    net, states = mlp(), [mlp()]
    train(
        net, *classes(120), batch=20, epochs=5,
        after_step=lambda: states.append(copy.deepcopy(net)),
    )  # fmt: skip
    for name, right in zip(names, states[10::10], strict=True):
        same_weights(read_weights(folder, name), right, name)
