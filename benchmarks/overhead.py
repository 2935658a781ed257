"""What `fit` costs over a loop tuned by hand.

    python benchmarks/overhead.py             # about three minutes
    python benchmarks/overhead.py --quick     # a rough look
    python benchmarks/overhead.py --json results.json

Part 1: microseconds per step on a tiny net, `fit` against the loop, over the same batches.
Part 2: samples per second on in-memory arrays of 60,000 x 784.

Before anything is timed, both sides must have learned the same weights, bit for bit. Then each pair
is run in turns (A B, B A, A B, ...), so that what else the machine does meets both alike; shown are
the median over the pairs and the quartiles, by the clock and by the process's CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import fitkit

Batch = tuple[torch.Tensor, torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


# ---------------------------------------------------------------------- the two sides


def tuned_loop(
    net: nn.Module,
    optimizer: Optimizer,
    batches: Callable[[], Iterable[Batch]],
    *,
    epochs: int,
    accuracy: bool,
) -> float:
    """The best loop that is still a plain one: nothing is read back before an epoch ends.

    Returns:
        The last epoch's loss, the mean over its batches.
    """
    net.train()
    loss_mean = 0.0
    for _ in range(epochs):
        total = torch.zeros(())
        correct = torch.zeros((), dtype=torch.int64)
        steps = 0
        for x, y in batches():
            optimizer.zero_grad(set_to_none=True)
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if accuracy:
                correct += (logits.argmax(1) == y).sum()
            steps += 1
        loss_mean = total.item() / steps
        correct.item()
    return loss_mean


def compiled_model(net: nn.Module, optimizer: str, *, accuracy: bool) -> fitkit.Model:
    """The same net, optimizer and loss for `fit`, on the CPU."""
    model = fitkit.Model(net)
    model.compile(
        optimizer=OPTIMIZERS[optimizer](net.parameters()),
        loss="cross_entropy",
        metrics=["accuracy"] if accuracy else None,
        accelerator="cpu",
    )
    return model


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them, the same weights each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def made_up_data(samples: int, features: int) -> Batch:
    """Seeded data that can be learned: the digit is the largest of ten random projections."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, features, generator=generator)
    y = (x @ torch.randn(features, 10, generator=generator)).argmax(1)
    return x, y


def index_select_slices(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    """A shuffled pass over tensors without a DataLoader."""
    for chosen in torch.randperm(len(x)).split(batch_size):
        yield x.index_select(0, chosen), y.index_select(0, chosen)


# ---------------------------------------------------------------------- measuring


@dataclass
class Spread:
    """A median between its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)

    def text(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} [{self.low:,.{digits}f} .. {self.high:,.{digits}f}]"


@dataclass
class Pairs:
    """Seconds of two callables that were run in turns: (clock, CPU) for each run."""

    reference: list[tuple[float, float]]
    candidate: list[tuple[float, float]]

    def ratio(self, clock: int) -> Spread:
        """Candidate over reference, pair by pair; 0 is the wall clock, 1 CPU time."""
        return Spread.of([c[clock] / r[clock] for r, c in self._both()])

    def extra_us(self, clock: int, steps: int) -> Spread:
        """What the candidate needs more, in microseconds per step."""
        return Spread.of([(c[clock] - r[clock]) / steps * 1e6 for r, c in self._both()])

    def each_us(self, clock: int, steps: int) -> tuple[Spread, Spread]:
        """Microseconds per step of the reference and of the candidate."""
        return (
            Spread.of([seconds[clock] / steps * 1e6 for seconds in self.reference]),
            Spread.of([seconds[clock] / steps * 1e6 for seconds in self.candidate]),
        )

    def _both(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        return list(zip(self.reference, self.candidate, strict=True))


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one run: (clock, CPU time of the process)."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turns(reference: Callable[[], Any], candidate: Callable[[], Any], pairs: int) -> Pairs:
    """Time both, in turns, after one untimed run of each."""
    reference()
    candidate()
    result = Pairs([], [])
    for number in range(pairs):
        if number % 2 == 0:
            result.reference.append(timed(reference))
            result.candidate.append(timed(candidate))
        else:
            result.candidate.append(timed(candidate))
            result.reference.append(timed(reference))
    return result


def check_same_weights(what: str, one: nn.Module, other: nn.Module) -> None:
    """End the program where two trained nets differ in a single bit.

    Raises:
        SystemExit: they differ: then there is nothing to compare.
    """
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        if not torch.equal(a, b):
            sys.exit(
                f"{what}: {name} differs after training, by up to {(a - b).abs().max():.3g}: "
                "fit and the loop do not do the same work, so nothing was timed."
            )


# ---------------------------------------------------------------------- part 1


def loader_of(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> DataLoader[Any]:
    """A shuffling loader with a generator of its own, so that two of them give the same order."""
    return DataLoader(
        TensorDataset(x, y),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )


def microseconds_per_step(
    optimizer: str, *, accuracy: bool, listed: bool, steps: int, pairs: int
) -> dict[str, Any]:
    """One row of part 1: fit against the loop on 32-64-10, batches of 32.

    Args:
        optimizer: a key of OPTIMIZERS.
        accuracy: whether both sides also count the right answers.
        listed: whether the batches come from a list instead of a loader, which leaves the
            loader's own noise out.
        steps: of one run, which is one epoch.
        pairs: runs of each side.
    """
    x, y = made_up_data(32 * steps, 32)

    def data() -> Any:
        return list(loader_of(x, y, 32)) if listed else loader_of(x, y, 32)

    loop_net, fit_net = mlp(32, 64, 10), mlp(32, 64, 10)
    loop_optimizer = OPTIMIZERS[optimizer](loop_net.parameters())
    model = compiled_model(fit_net, optimizer, accuracy=accuracy)
    loop_data, fit_data = data(), data()

    def loop(epochs: int = 1) -> float:
        return tuned_loop(
            loop_net, loop_optimizer, lambda: loop_data, epochs=epochs, accuracy=accuracy
        )

    def fit(epochs: int = 1) -> float:
        history = model.fit(fit_data, epochs=epochs, verbose=0)
        return float(history.history["loss"][-1])

    name = f"{optimizer}{', accuracy' if accuracy else ''}, {'list' if listed else 'DataLoader'}"
    loop_loss, fit_loss = loop(2), fit(2)
    check_same_weights(name, loop_net, fit_net)
    if abs(loop_loss - fit_loss) > 1e-4 * abs(loop_loss):
        sys.exit(f"{name}: the loop's loss is {loop_loss}, fit's {fit_loss}")

    measured = in_turns(loop, fit, pairs)
    loop_us, fit_us = measured.each_us(0, steps)
    return {
        "what": name,
        "loop_us": loop_us,
        "fit_us": fit_us,
        "extra_us": measured.extra_us(0, steps),
        "extra_cpu_us": measured.extra_us(1, steps),
        "ratio": measured.ratio(0),
        "cpu_ratio": measured.ratio(1),
    }


def cost_of_a_call(calls: int) -> Spread:
    """Microseconds of a whole `fit` call of one step: what is paid once, however long it runs."""
    x, y = made_up_data(32, 32)
    model = compiled_model(mlp(32, 64, 10), "SGD", accuracy=False)
    model.fit(x, y, verbose=0)
    return Spread.of([timed(lambda: model.fit(x, y, verbose=0))[0] * 1e6 for _ in range(calls)])


# ---------------------------------------------------------------------- part 2


def samples_per_second(
    against: str, batch_size: int, *, samples: int, pairs: int
) -> dict[str, Any]:
    """One row of part 2: `fit(x, y)` against a loop on 784-128-10, SGD, one shuffled epoch.

    Args:
        against: "DataLoader" or "index_select".
        batch_size: of both sides.
        samples: rows of x.
        pairs: runs of each side.
    """
    x, y = made_up_data(samples, 784)
    arrays = x.numpy(), y.numpy()
    loop_net, fit_net = mlp(784, 128, 10), mlp(784, 128, 10)
    loop_optimizer = OPTIMIZERS["SGD"](loop_net.parameters())
    model = compiled_model(fit_net, "SGD", accuracy=False)

    # Unshuffled first, because the two sides draw their orders in different ways.
    in_order = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    tuned_loop(loop_net, loop_optimizer, lambda: in_order, epochs=1, accuracy=False)
    model.fit(*arrays, batch_size=batch_size, shuffle=False, verbose=0)
    check_same_weights(f"arrays, batches of {batch_size}", loop_net, fit_net)

    loader = loader_of(x, y, batch_size)
    sources: dict[str, Callable[[], Iterable[Batch]]] = {
        "DataLoader": lambda: loader,
        "index_select": lambda: index_select_slices(x, y, batch_size),
    }

    def loop() -> float:
        return tuned_loop(loop_net, loop_optimizer, sources[against], epochs=1, accuracy=False)

    measured = in_turns(loop, lambda: model.fit(*arrays, batch_size=batch_size, verbose=0), pairs)

    def rate(seconds: list[tuple[float, float]]) -> Spread:
        return Spread.of([samples / clock for clock, _ in seconds])

    return {
        "what": f"batch {batch_size}, against {against}",
        "loop_per_s": rate(measured.reference),
        "fit_per_s": rate(measured.candidate),
        "ratio": measured.ratio(0),
        "cpu_ratio": measured.ratio(1),
    }


# ---------------------------------------------------------------------- showing


def table_of(title: str, columns: dict[str, tuple[str, int]], rows: list[dict[str, Any]]) -> Table:
    """A table; `columns` maps a row's key to (heading, digits)."""
    table = Table(title=title)
    table.add_column("")
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [row[key].text(digits) for key, (_, digits) in columns.items()]
        table.add_row(row["what"], *cells)
    return table


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "fitkit": fitkit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def as_plain_data(value: object) -> Any:
    """For json: a spread as a dict of its three numbers."""
    return vars(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the time, rougher")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    quick = arguments.quick

    # One thread: two of them on a shared machine wait for each other, which hides everything else.
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print("  ".join(f"{key} {value}" for key, value in machine().items()), style="dim")

    steps, pairs = (300, 6) if quick else (1000, 15)
    per_step = []
    for listed, accuracy, optimizer in [
        (False, False, "SGD"),
        (False, False, "Adam"),
        (False, True, "SGD"),
        (True, False, "SGD"),
        (True, False, "Adam"),
        (True, True, "SGD"),
    ]:
        per_step.append(
            microseconds_per_step(
                optimizer, accuracy=accuracy, listed=listed, steps=steps, pairs=pairs
            )
        )
    columns = {
        "loop_us": ("loop, µs", 0),
        "fit_us": ("fit, µs", 0),
        "extra_us": ("fit − loop, µs", 1),
        "extra_cpu_us": ("the same, CPU", 1),
        "cpu_ratio": ("ratio, CPU", 3),
    }
    console.print(table_of("Per step: MLP 32-64-10, batches of 32", columns, per_step))
    call_us = cost_of_a_call(10 if quick else 50)
    console.print(f"A whole fit call of one step: {call_us.text(0)} µs\n")

    samples = 12_000 if quick else 60_000
    arrays = [
        samples_per_second(against, batch_size, samples=samples, pairs=4 if quick else 10)
        for batch_size in (32, 128)
        for against in ("DataLoader", "index_select")
    ]
    columns = {
        "loop_per_s": ("loop, samples/s", 0),
        "fit_per_s": ("fit, samples/s", 0),
        "ratio": ("time ratio", 3),
        "cpu_ratio": ("ratio, CPU", 3),
    }
    title = f"In-memory arrays {samples:,} x 784: MLP 784-128-10, SGD, shuffled"
    console.print(table_of(title, columns, arrays))
    legend = "Each: median [quartiles]; ratios: fit / loop, pair by pair (below 1: fit is faster)"
    console.print(legend, markup=False)

    if arguments.json:
        results = {
            "machine": machine(),
            "quick": quick,
            "per_step": per_step,
            "call_us": call_us,
            "arrays": arrays,
        }
        arguments.json.write_text(json.dumps(results, default=as_plain_data, indent=2) + "\n")


if __name__ == "__main__":
    main()
