"""Export a net for batches of any size."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.agents.arithmetic import classes, mlp, near, write

PROMPT = """
data.npz has x (100, 8), float32, and y (100,), class numbers from 0 to 2. The net is
Linear(8, 16), ReLU, Dropout(0.5), Linear(16, 3), and gives logits. start.pt is the state dict
of its torch Sequential. Load these weights, don't train, and write model.pt2: the net as it
computes in evaluation, exported by torch.export, so that
torch.export.load("model.pt2").module()(x) gives its logits without fitkit. x may have any
number of rows, from 2 to 1000.
"""
WRONG = ('example=data["x"][:4]', 'example=data["x"][:4], dynamic_batch=False')


def with_dropout() -> torch.nn.Sequential:
    first, relu, last = mlp()
    return torch.nn.Sequential(first, relu, torch.nn.Dropout(0.5), last)


def give(folder: Path) -> None:
    x, y = classes()
    write(folder, with_dropout(), x=x, y=y)


def check(folder: Path) -> None:
    assert (folder / "model.pt2").is_file(), "there is no model.pt2"
    (x, _), net = classes(37, seed=2), with_dropout().eval()
    exported = torch.export.load(folder / "model.pt2").module()
    with torch.no_grad():
        for rows in (37, 5):
            try:
                found = exported(x[:rows])
            except Exception as error:
                raise AssertionError(f"{rows} rows: {error}") from error
            near(found, net(x[:rows]), f"logits of {rows} rows", 1e-5)
