"""A step with transforms of its batch, divided by one without: CPU time.

    python benchmarks/transforms.py    # about a minute

The same convolutional network trains in turns, one epoch at a time, in one process and one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fitkit
from fitkit.transforms import CutMix, MixUp, OneOf, RandomErasing

ROWS, BATCH, TURNS = 3200, 32, 15

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


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.rand(ROWS, 3, 16, 16), torch.randint(0, 10, (ROWS,))
    models, times = {}, {name: list[float]() for name in RECIPES}
    for name, recipe in RECIPES.items():
        models[name] = fitkit.Model(build_net())
        models[name].compile("adam", "cross_entropy", batch_transforms=recipe)
        models[name].fit(x, y, batch_size=BATCH, verbose=0)
    for _ in range(TURNS):
        for name, model in models.items():
            start = time.process_time()
            model.fit(x, y, batch_size=BATCH, verbose=0)
            times[name].append(time.process_time() - start)
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times["without"], strict=True)]
        step = statistics.median(found) / (ROWS // BATCH) * 1e3
        print(f"{name:30} {statistics.median(ratios):.2f}   ({step:.2f} ms a step)")


if __name__ == "__main__":
    main()
