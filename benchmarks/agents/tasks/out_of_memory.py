"""Train on batches of which some don't fit into memory, each as one update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.agents.arithmetic import mlp, near, read_json, read_weights, same_weights, write

PROMPT = """
data.npz has six batches of sequences: x0 (16, 5, 8), x1 (16, 12, 8), … x5, float32, of other
lengths in axis 1, and their classes y0 (16,), … y5, numbers from 0 to 2. net.py has the class
Net, which gives logits. start.pt is its state dict; begin with these weights. Train it for 2
epochs by plain SGD, learning rate 0.2, on the cross entropy. Each of the six batches is one
update, in their order.

Net raises torch.OutOfMemoryError where rows times length exceed 100, as a real one may on a
GPU. So batches that don't fit must be computed in parts, which all have a part in the batch's
one update: the weights are those that whole batches would give. Batches that fit are computed
whole. You can't change net.py. It writes a line for each batch or part that it computes in
training mode to calls.jsonl: leave that file where it is.

Write weights.pt, the trained net's state dict (torch.save), and history.json with "loss": a
list of the mean training loss over the samples in each epoch.
"""
ASKED = "pytorch/pytorch#52036"
WRONG = (
    'batches = [(data[f"x{n}"], data[f"y{n}"]) for n in range(6)]',
    'batches = [(data[f"x{n}"][i::4], data[f"y{n}"][i::4]) for n in range(6) for i in range(4)]',
)
NET = """\
import json

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        rows, length, _ = x.shape
        if rows * length > 100:
            raise torch.OutOfMemoryError(f"out of memory: {rows} rows of {length} steps")
        if self.training:
            with open("calls.jsonl", "a") as file:
                print(json.dumps([rows, length]), file=file)
        return self.body(x.mean(1))
"""
LENGTHS = (5, 12, 6, 20, 4, 9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        x = torch.from_numpy(rng.normal(size=(16, length, 8)).astype("float32"))
        found.append((x, x.mean(1)[:, :3].argmax(1)))
    return found


class Net(nn.Module):
    """The net without its limit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x.mean(1))
        return found


def give(folder: Path) -> None:
    arrays: dict[str, Any] = {}
    for n, (x, y) in enumerate(batches()):
        arrays |= {f"x{n}": x, f"y{n}": y}
    write(folder, Net(), **arrays)
    (folder / "net.py").write_text(NET)


def check(folder: Path) -> None:
    net, losses = Net(), []
    sgd = torch.optim.SGD(net.parameters(), 0.2)
    for _ in range(2):
        total = 0.0
        for x, y in batches():
            sgd.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            sgd.step()
            total += loss.item()
        losses.append(total / 6)
    same_weights(read_weights(folder), net)
    near(read_json(folder, "history.json")["loss"], losses, "loss")
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    for length in LENGTHS:
        parts = {rows for rows, found in calls if found == length}
        fits = 16 * length <= 100
        assert (16 in parts) is fits, f"batches of length {length} in parts of {sorted(parts)} rows"
        assert not fits or parts == {16}, f"batches of length {length} fit, and were cut"
