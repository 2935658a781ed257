"""How long saving holds up the training: at once, and by a thread.

    python benchmarks/stall.py                         # 28 million parameters, about a minute
    python benchmarks/stall.py --layers 14 --json results.json

A model trains with a save after every few steps. The stall is the time between a step that is saved
and the next one, beyond what passes between other steps. A thread also slows down the steps while
it writes: the time of the whole fit, against one that saves nothing, shows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fitkit
from fitkit.callbacks import Callback, ModelCheckpoint

WAYS: dict[str, dict[str, Any] | None] = {
    "no saves": None,
    "at once": {},
    "by a thread": {"asynchronous": True},
}


class Pauses(Callback):
    """The time from each step's end to the next one's beginning, in seconds."""

    stops_alike = True

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ended: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.ended is not None:
            self.seconds.append(time.perf_counter() - self.ended)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.ended = time.perf_counter()  # The checkpoint's own hook comes last.


def trained(
    options: dict[str, Any] | None, folder: Path, layers: int, every: int, saves: int
) -> Any:
    """Train so many steps that there are so many saves; the pauses' seconds, and fit's."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = fitkit.Model(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))
    model.compile("adam", "mse")
    pauses = Pauses()
    callbacks: list[Callback] = [pauses]
    if options is not None:
        callbacks.append(ModelCheckpoint(folder / "stall.h5", save_freq=every, **options))
    steps = every * (saves + 1) - 1  # the last file has time to be written
    x = torch.randn(steps, 32, 768)
    began = time.perf_counter()
    model.fit(x, x, batch_size=1, verbose=0, callbacks=callbacks)
    return pauses.seconds, time.perf_counter() - began


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of each way: medians over the rounds, in milliseconds."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(arguments.rounds):
            for way, options in WAYS.items():
                seconds, total = trained(
                    options, Path(folder), arguments.layers, arguments.every, arguments.saves
                )
                saving = seconds[arguments.every - 1 :: arguments.every]
                others = [s for i, s in enumerate(seconds, 1) if i % arguments.every]
                plain = statistics.median(others)
                found[way].append(
                    {
                        "first": 1e3 * (saving[0] - plain),
                        "stall": 1e3 * (statistics.median(saving[1:] or saving) - plain),
                        "fit": 1e3 * total,
                    }
                )
    return {
        way: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for way, rows in found.items()
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="7.1 million parameters each")
    parser.add_argument("--every", type=int, default=8, help="steps from save to save")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the files go; default: temporary")
    parser.add_argument("--json", type=Path, default=None, help="a file for the figures")
    arguments = parser.parse_args()
    figures = measured(arguments)
    print(f"{arguments.layers} layers, {os.cpu_count()} cores, torch {torch.__version__}; ms")
    names = list(next(iter(figures.values())))
    print(f"{'':12}" + "".join(f"{name:>12}" for name in names))
    for way, row in figures.items():
        print(f"{way:12}" + "".join(f"{row[name]:12.1f}" for name in names))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
