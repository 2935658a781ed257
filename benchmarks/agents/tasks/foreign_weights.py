"""Begin with another program's weights, but for the head."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is torch's
Sequential of Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is its state dict.
pretrained.pt, written by torch.save, comes from another program, which trained a net of the
same body on 10 classes under DataParallel: its names begin with "module.", and its last layer
is Linear(16, 10). Begin with the pretrained weights of the first layer, and the last layer
of start.pt. Train for 3 epochs by plain SGD, learning rate 0.1, on the cross entropy, in
batches of 20, in the order of the data.

Write weights.pt, the trained net's state dict (torch.save).
"""
ASKED = "pytorch/pytorch#3805"
WRONG = (
    'model.load_weights("pretrained.pt", skip_mismatch=True)',
    'net[0].load_state_dict(torch.load("pretrained.pt"), strict=False)',
)


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, mlp(), x=x, y=y)
    others = mlp(10, seed=11).state_dict().items()
    torch.save({f"module.{name}": value for name, value in others}, folder / "pretrained.pt")


def check(folder: Path) -> None:
    net = mlp()
    net[0].load_state_dict(mlp(10, seed=11)[0].state_dict())
    train(net, *classes(), batch=20, epochs=3)
    same_weights(read_weights(folder), net)
