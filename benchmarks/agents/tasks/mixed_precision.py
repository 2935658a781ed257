"""Train in bfloat16 mixed precision."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.agents.arithmetic import (
    classes,
    mlp,
    read_json,
    read_weights,
    same_weights,
    train,
    write,
)

PROMPT = """
data.npz has x (96, 8), float32, and y (96,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential; begin with these weights. Train for 10 epochs by plain SGD, learning rate 0.5, on
the cross entropy, in batches of 16, in the order of the data, in mixed precision with
bfloat16: the net computes under torch's autocast, the weights and their updates are float32.

Write weights.pt, the trained net's state dict (torch.save), and result.json with "dtype", the
name of the weights' dtype, such as "torch.float64".
"""
WRONG = ('precision="bf16-mixed"', "precision=32")


def give(folder: Path) -> None:
    x, y = classes(96)
    write(folder, mlp(), x=x, y=y)


def check(folder: Path) -> None:
    (x, y), net, single = classes(96), mlp(), mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(10):
        for first in range(0, 96, 16):
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(x[first : first + 16])
            optimizer.zero_grad()
            F.cross_entropy(logits.float(), y[first : first + 16]).backward()
            optimizer.step()
    train(single, x, y, batch=16, epochs=10, rate=0.5)
    found = read_weights(folder)
    assert all(value.dtype == torch.float32 for value in found.values()), "not float32"
    assert read_json(folder, "result.json")["dtype"] == "torch.float32"

    def distance(other: torch.nn.Module) -> float:
        pairs = zip(found.values(), other.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)

    # bfloat16 has 3 digits: other orders of the same sums differ, though less than float32.
    same_weights(found, net, tolerance=0.02)
    assert distance(net) < distance(single) / 3, "these are float32's weights"
