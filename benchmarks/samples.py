"""What it costs that a sample's random numbers belong to the sample: reading, without a net."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.measuring import Row, Seconds, in_turns, row_of, timed
from fitkit.data.sources import make_source

DRAWS: dict[str, Any] = {
    "nothing": lambda own: None,
    "torch": lambda own: torch.rand(()),
    "NumPy": lambda own: np.random.rand(),
    "random": lambda own: random.random(),
    "all three": lambda own: (torch.rand(()), np.random.rand(), random.random()),
    "its own default_rng": lambda own: own.random(),
}
"""What a sample draws, by name."""


class Samples(Dataset[Any]):
    """Rows of a tensor, each with some work and some draws."""

    def __init__(self, count: int, draws: str, work: float = 0.0) -> None:
        self.rows = torch.zeros(count, 4)
        self.draw, self.work = DRAWS[draws], work
        self.own = np.random.default_rng(0) if "own" in draws else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.work:
            until = time.perf_counter() + self.work
            while time.perf_counter() < until:
                pass
        self.draw(self.own)
        return self.rows[index]


def rows(pairs: int, share: float = 1.0) -> Iterator[Row]:
    """Yield what fitkit takes to read a pass, beside the loader itself."""
    many, few = int(20_000 * share), max(int(400 * share), 64)
    for size in (1, 10, 32, 100):
        yield beside(
            DataLoader(Samples(many, "nothing"), size), f"nothing, batches of {size}", pairs
        )
    for draws in [*DRAWS][1:]:
        yield beside(DataLoader(Samples(many, draws), 32), f"{draws}, batches of 32", pairs)
    for draws in ("nothing", "torch", "all three"):
        loader = DataLoader(Samples(few, draws, 1e-3), 32)
        yield beside(loader, f"a millisecond of work, {draws}", pairs)
    yield beside(DataLoader(TensorDataset(torch.zeros(many, 4)), 32), "a TensorDataset", pairs)


def beside(loader: DataLoader[Any], task: str, pairs: int) -> Row:
    """Return the row of a loader's data."""
    source = make_source(loader)

    def plain() -> Seconds:
        return timed(lambda: read(iter(loader)))

    def ours() -> Seconds:
        return timed(lambda: read(source.batches(0)))

    plain(), ours()
    count = len(loader.dataset)  # type: ignore[arg-type]
    return row_of(
        in_turns(plain, ours, pairs),
        1e6 / count,
        scenario="samples",
        task=task,
        contender="fitkit",
        reference="DataLoader",
        unit="µs a sample",
    )


def read(batches: Iterator[Any]) -> None:
    """Read a pass."""
    for _ in batches:
        pass
