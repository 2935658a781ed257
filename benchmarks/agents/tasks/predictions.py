"""Write predictions that memory can't hold to a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.agents.arithmetic import mlp, near, write

PROMPT = """
data.npz has x (5003, 8), float32. Think of it as more than memory holds. The net is
Linear(8, 16), ReLU, Linear(16, 3), and gives logits. start.pt is the state dict of its torch
Sequential. Load these weights, don't train. Write probabilities.npy, a float32 array
(5003, 3): the softmax of the logits of each row, in the order of x. Compute batch by batch,
and don't hold the outputs of all batches in memory at once.
"""
ASKED = "Lightning-AI/pytorch-lightning#20334"
WRONG = ("nn.Sequential(net, nn.Softmax(dim=1))", "net")


def give(folder: Path) -> None:
    write(folder, mlp(), x=rows())


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5003, 8)).astype("float32")


def check(folder: Path) -> None:
    path = folder / "probabilities.npy"
    assert path.is_file(), "there is no probabilities.npy"
    found = np.load(path)
    assert found.dtype == np.float32, f"probabilities.npy is {found.dtype}"
    with torch.no_grad():
        near(found, mlp()(torch.from_numpy(rows())).softmax(1), "probabilities.npy", 1e-5)
