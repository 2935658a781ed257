"""Find the update at which two runs part, and what parted first."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.agents.arithmetic import classes, mlp, read_json

PROMPT = """
The folder runs has four trainings that fitkit's RunFolder recorded: base, a, b and c. All four
should have been the same, but each of a, b and c was changed in one thing. Compare each with
base. Write result.json, a dict from "a", "b" and "c" to dicts with "update": the number of the
first update, counted from 1, at which the run parts from base, and "first": what parted first
there, "samples" (the data's order), "rate" (the learning rate) or "loss" (something else, with
the same samples and rates).
"""
WRONG = ('for name in ("samples", "rate", "loss")', 'for name in ("loss", "rate", "samples")')
RIGHT = {
    "a": {"update": 9, "first": "rate"},
    "b": {"update": 3, "first": "samples"},
    "c": {"update": 4, "first": "loss"},
}


def record(
    folder: Path, *, slow_from: int = 99, order: tuple[int, ...] = (), row: int | None = None
) -> None:
    """Train for 12 updates of 16 samples, with half the rate from an update on, two samples in
    each other's place, or another label of a row."""
    import fitkit

    x, y = classes(96)
    if row is not None:
        y[row] = (y[row] + 1) % 3
    places = list(range(96))
    if order:
        places[order[0]], places[order[1]] = places[order[1]], places[order[0]]
    model = fitkit.Model(mlp())
    model.compile(
        "sgd", "cross_entropy", learning_rate=0.1, accelerator="cpu", devices=1,
        lr_scheduler={
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda done: 0.5 if done >= slow_from else 1.0
            ),
            "interval": "step",
        },
    )  # fmt: skip
    data = DataLoader(TensorDataset(x, y), 16, sampler=places)
    runs = fitkit.callbacks.RunFolder(str(folder))
    model.fit(data, epochs=2, verbose=0, callbacks=runs)


def give(folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        record(folder / "runs" / "base")
        record(folder / "runs" / "a", slow_from=9)
        record(folder / "runs" / "b", order=(40, 70))
        record(folder / "runs" / "c", row=50)


def check(folder: Path) -> None:
    found = read_json(folder, "result.json")
    assert found == RIGHT, f"result.json has {found}, not {RIGHT}"
