"""A step with transforms of its batch, divided by one without: CPU time.

    python benchmarks/transforms.py    # about a minute

The same convolutional network trains in turns, one short epoch at a time, in one process and one
thread. Lines "by hand" are the same in plain PyTorch: what MixUp costs whoever writes it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import fitkit
from fitkit.transforms import CutMix, MixUp, OneOf, RandomErasing

ROWS, BATCH, TURNS = 1280, 32, 40

RECIPES: dict[str, list[Callable[..., Any]] | None] = {
    "without": None,
    "MixUp": [MixUp(0.2)],
    "CutMix": [CutMix(1.0)],
    "RandomErasing": [RandomErasing(0.25)],
    "MixUp or CutMix, then erasing": [OneOf(MixUp(0.2), CutMix(1.0)), RandomErasing(0.25)],
}


def build_net() -> nn.Module:
    """Return a network of some two milliseconds a step for images of shape (B, 3, 16, 16)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def by_hand(net: nn.Module, x: torch.Tensor, y: torch.Tensor, *, mixes: bool) -> None:
    """Train an epoch by a loop of plain PyTorch, with MixUp or without."""
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    numbers = np.random.default_rng(0)
    order = torch.randperm(ROWS)
    for rows in order.split(BATCH):
        images, target = x[rows], y[rows]
        if mixes:
            ratio = numbers.beta(0.2, 0.2)
            target = nn.functional.one_hot(target, 10).float()
            images = torch.lerp(images.roll(1, 0), images, ratio)
            target = torch.lerp(target.roll(1, 0), target, ratio)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), target).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.rand(ROWS, 3, 16, 16), torch.randint(0, 10, (ROWS,))
    runs: dict[str, Callable[[], object]] = {}
    for name, recipe in RECIPES.items():
        model = fitkit.Model(build_net())
        model.compile("adam", "cross_entropy", batch_transforms=recipe)
        runs[name] = partial(model.fit, x, y, batch_size=BATCH, verbose=0)
    runs["by hand, without"] = partial(by_hand, build_net(), x, y, mixes=False)
    runs["by hand, MixUp"] = partial(by_hand, build_net(), x, y, mixes=True)
    times = {name: list[float]() for name in runs}
    for turn in range(TURNS + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    for name, found in times.items():
        base = times["by hand, without" if name.startswith("by hand") else "without"]
        ratios = [a / b for a, b in zip(found, base, strict=True)]
        step = statistics.median(found) / (ROWS // BATCH) * 1e3
        print(f"{name:30} {statistics.median(ratios):.2f}   ({step:.2f} ms a step)")


if __name__ == "__main__":
    main()
