"""What grows with the number of ranks: requests, bytes and seconds, counted and modelled.

    python -m benchmarks.ranks                  # some three minutes
    python -m benchmarks.ranks --processes 16   # real processes up to that many (default: 8)

Three kinds of measurement:

1. Ranks as threads, 2 to 64, with real stores and real connections of gloo: requests to the store
   where the ranks meet, join, watch each other and look for a rank that is silent.
2. One rank alone among n of which the others are made up, n from 2 to 4,096: what it computes to
   deal out batches, to read everybody's message, and to join everybody's sums.
3. Real processes under torchrun, 2 to `--processes`: exchanges and bytes of each verb, and seconds
   from the start to the end and from a failure to the last rank's error.

A law (a + b·n, or a + b·n²) is fitted to the smaller half of the numbers of ranks and held against
the larger half: the table says by how much the last measured figure differs from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

import fitkit
from benchmarks.measuring import Row, Spread
from fitkit.data.sources import make_source
from fitkit.distributed.collectives import Solo
from fitkit.extras.data_on_ranks.sharding import sharded
from fitkit.extras.launchers.meeting import Meeting
from fitkit.extras.launchers.process_group import pack, unpack
from fitkit.extras.launchers.stores import REQUESTS_PER_S, PromptStore
from fitkit.extras.launchers.watch import Failure, Watch
from fitkit.training.log import _merged, noted_by

THREADS = (2, 4, 8, 16, 32, 64)
ALONE = (2, 8, 64, 512, 4096)
SHOWN = (8, 64, 512, 4096)
ROOT = Path(__file__).parents[1]
MINUTE = timedelta(minutes=1)


@dataclasses.dataclass
class Growth:
    """A figure by number of ranks.

    Attributes:
        what: is measured.
        unit: of the figures.
        power: of n in its law: 0, 1 or 2; None where a few processes on as few cores say nothing of
            many.
        measured: by number of ranks.
        most: what it can't exceed; None where nothing bounds it.
    """

    what: str
    unit: str
    power: int | None
    measured: dict[int, float]
    most: float | None = None

    def law(self) -> tuple[float, float]:
        """Fit a and b of a + b·n^power, through the middle of the figures and the first one."""
        sizes = sorted(self.measured)
        first, last = sizes[0], sizes[len(sizes) // 2]
        if not self.power or first == last:  # no slope
            return self.measured[last], 0.0
        slope = (self.measured[last] - self.measured[first]) / (
            last**self.power - first**self.power
        )
        return self.measured[first] - slope * first**self.power, slope

    def modelled(self, ranks: int) -> float:
        """Return what the law says."""
        a, b = self.law()
        found = a + b * ranks ** (self.power or 0)
        return found if self.most is None else min(found, self.most)

    def line(self) -> str:
        """Return the table's row: measured figures plain, modelled ones with a tilde."""
        modelled = "–" if self.power is None else "~ {:,.3g}"
        cells = [
            f"{self.measured[n]:,.3g}" if n in self.measured else modelled.format(self.modelled(n))
            for n in SHOWN
        ]
        law = {None: "", 0: "constant", 1: "n", 2: "n²"}[self.power]
        largest, check = max(self.measured), ""
        if self.power is not None and len(self.measured) > 2:
            off = self.measured[largest] / max(self.modelled(largest), 1e-12) - 1
            check = f"{off:+.0%} at {largest}"
        return f"| {self.what} | {self.unit} | {law} | {' | '.join(cells)} | {check} |"


# ------------------------------------------------------------------------- ranks as threads


class CountingStore(Store):
    """A store that counts the requests that reach it, by thread."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.requests: Counter[str] = Counter()

    def _count(self) -> None:
        self.requests[threading.current_thread().name] += 1

    def clone(self) -> CountingStore:
        return self

    def set(self, key: str, value: Any) -> None:
        self._count()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        return self._store.get(key)

    def add(self, key: str, number: int) -> int:
        self._count()
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._count()
        return self._store.compare_set(key, expected, value)

    def deleteKey(self, key: str) -> bool:  # noqa: N802, by which C++ finds it
        self._count()
        return self._store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta = MINUTE) -> None:
        self._count()
        self._store.wait(keys, timeout)


def on_threads(size: int, call: Callable[[int], Any]) -> float:
    """Call `call(rank)` on all ranks at once; the seconds until the last is done."""
    began = time.perf_counter()
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(call, range(size)))
    return time.perf_counter() - began


def meeting(size: int) -> float:
    """Return requests of all ranks that come to a call at once."""
    store = CountingStore(HashStore())
    on_threads(size, lambda rank: Meeting(rank, size, "fit", MINUTE).in_part_of(store))
    return sum(store.requests.values())


def joining(size: int) -> float:
    """Return requests of all ranks while gloo connects each with each."""
    server = TCPStore("127.0.0.1", 0, None, True, MINUTE, wait_for_workers=False)
    store = CountingStore(server)
    groups: list[Any] = []

    def join(rank: int) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = MINUTE
        prompt = PromptStore(store, size)
        prompt.set_timeout(MINUTE)
        groups.append((prompt, ProcessGroupGloo(PrefixStore("g", prompt), rank, size, options)))

    on_threads(size, join)
    return sum(store.requests.values())


def watching(size: int) -> float:
    """Return requests a second of all ranks' watches while all is well."""
    store, seconds = CountingStore(HashStore()), 3.0
    over = threading.Event()

    def watch(rank: int) -> None:
        with Watch(store, rank, size, lambda: None, lambda: None, False):
            over.wait(seconds)

    took = on_threads(size, watch)
    return sum(store.requests.values()) / took


def seeking(size: int) -> float:
    """Return requests of all ranks that look for one that is silent, until they have found it."""
    store = CountingStore(HashStore())
    error = RuntimeError("Connection closed by peer")

    def seek(rank: int) -> None:
        if rank == size - 1:
            return
        with Watch(store, rank, size, lambda: None, lambda: None, False) as own:
            failure = own.cause(error)
            assert isinstance(failure, Failure) and failure.rank == size - 1

    on_threads(size, seek)
    return sum(store.requests.values())


# ---------------------------------------------------------------------- one rank among n


class OneOf(Solo):
    """The collectives of rank 0 among `size` ranks that are made up."""

    def __init__(self, size: int) -> None:
        self.world_size = size


def fastest(call: Callable[[], Any], times: int = 5) -> float:
    """Seconds of a call, the fastest of some."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def dealing(size: int, samples: int = 10_000_000, batch_size: int = 32) -> float:
    """Microseconds a step that a rank takes to deal itself its batch of shuffled arrays."""
    source = make_source(torch.zeros(samples), batch_size=batch_size, shuffle=True)
    ranks = OneOf(size)
    shard = sharded(source, ranks, training=True, replace_sampler=True, scatter=True)
    whole = source.index_batches(0)  # type: ignore[attr-defined]
    shard._order = lambda number: whole  # type: ignore[attr-defined]
    steps = min(2000, samples // batch_size // size)

    def deal() -> None:
        batches = shard.batches(0)
        for _ in range(steps):
            next(batches)

    return fastest(deal) / steps * 1e6


def reading(size: int) -> float:
    """Milliseconds that a rank takes to read what each rank has noted of an epoch."""
    noted = noted_of_an_epoch()[0]
    packed = pack(noted, b"k" * 32, "gather 1 of rank 0")

    def read() -> None:
        for _ in range(size):
            unpack(packed, b"k" * 32, "gather 1 of rank 0", 0)

    return fastest(read, 3) * 1e3


def merging(size: int) -> float:
    """Milliseconds that a rank takes to make one epoch's values of what all have noted."""
    noted, logbook = noted_of_an_epoch()
    return fastest(lambda: _merged(logbook, OneOf(size), [noted] * size), 3) * 1e3


def noted_of_an_epoch() -> tuple[Any, Any]:
    """Return what a rank notes of an epoch with a loss and a metric, and its logbook."""
    found: list[Any] = []

    class Take(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            run: Any = self.model._fitkit.fit_state.run
            logbook = run.running.context.record
            found[:] = [noted_by(logbook, 0), logbook]

    model = fitkit.Model(torch.nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    model.fit(
        torch.randn(64, 4), torch.randint(3, (64,)), verbose=0, callbacks=Take(), batch_size=64
    )
    return found[0], found[1]


# --------------------------------------------------------------------------- processes

SCRIPT = """
import json, os, sys, time
began = float(os.environ["BEGAN"])
import torch, fitkit
import torch.distributed as dist
torch.set_num_threads(1)
counts = {}
class Here:
    name = "start"
def counting(name, size):
    exchange = getattr(dist, name)
    def counted(*arguments, **options):
        of = counts.setdefault(Here.name, [0, 0])
        of[0] += 1
        of[1] += size(*arguments)
        return exchange(*arguments, **options)
    setattr(dist, name, counted)
def nbytes(tensor, *_):
    return tensor.numel() * tensor.element_size()
counting("all_gather", lambda parts, *_: sum(map(nbytes, parts)))
counting("broadcast", nbytes)
counting("scatter", nbytes)
counting("all_reduce", nbytes)
torch.manual_seed(0)
x, y = torch.randn(4096, 8), torch.randint(3, (4096,))
model = fitkit.Model(torch.nn.Linear(8, 3))
model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
seconds = {}
def call(name, verb):
    Here.name, started = name, time.time()
    found = verb()
    seconds[name] = time.time() - started
    return found
fit = lambda epochs: model.fit(x, y, batch_size=8, epochs=epochs, verbose=0)
call("first fit", lambda: fit(1))
seconds["start"] = time.time() - began
call("fit", lambda: fit(1))
call("fit, 3 epochs", lambda: fit(3))
call("evaluate", lambda: model.evaluate(x, y, batch_size=8, verbose=0))
rows = call("predict", lambda: len(model.predict(x, batch_size=8, verbose=0)))
assert rows == 4096
call("save", lambda: model.save("model.h5"))
class Fails(fitkit.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if model.global_rank == model.world_size - 1:
            open("failed", "w").write(str(time.time()))
            raise KeyError("mine")
try:
    model.fit(x, y, batch_size=8, verbose=0, callbacks=Fails())
except (KeyError, fitkit.WorkerError):
    pass
seconds["failing"] = time.time() - float(open("failed").read())
json.dump([seconds, counts], open(f"rank{model.global_rank}.json", "w"))
"""


def processes(size: int) -> dict[str, Any]:
    """Seconds and exchanges of real processes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(textwrap.dedent(SCRIPT))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BEGAN": str(time.time())}
        done = subprocess.run(
            [sys.executable, *launcher, "train.py"], cwd=folder, timeout=300, text=True,
            env={**os.environ, **variables}, capture_output=True,
        )  # fmt: skip
        found = [Path(folder, f"rank{rank}.json") for rank in range(size)]
        if not all(path.exists() for path in found):
            raise SystemExit(done.stderr)
        everyones = [json.loads(path.read_text()) for path in found]
    (seconds, counts) = everyones[0]
    seconds["failing"] = max(each["failing"] for each, _ in everyones)
    return {"seconds": seconds, "counts": counts}


# ------------------------------------------------------------------------------ all of it


def growths(threads: tuple[int, ...], most_processes: int) -> Iterator[Growth]:
    """Everything that is measured, one after the other."""
    for what, unit, power, measure, most in (
        ("all ranks meet", "requests to rank 0's store", 1, meeting, None),
        ("gloo connects each with each", "requests to rank 0's store", 2, joining, None),
        ("while a call runs", "requests a second to it", 1, watching, REQUESTS_PER_S),
        ("a rank is silent: all look for it", "requests to rank 0's store", 1, seeking, None),
    ):
        yield Growth(what, unit, power, {n: measure(n) for n in threads}, most)
    for what, unit, power, alone in (
        ("arrays are dealt out", "µs a step, each rank", 0, dealing),
        ("reading what all ranks say", "ms an exchange, each rank", 1, reading),
        ("an epoch's values are joined", "ms an epoch, each rank", 1, merging),
    ):
        yield Growth(what, unit, power, {n: alone(n) for n in ALONE})
    sizes = [n for n in (2, 4, 8, 16) if n <= most_processes]
    found = {n: processes(n) for n in sizes}
    for verb, power in (
        ("first fit", 1), ("fit", 1), ("fit, 3 epochs", 1), ("evaluate", 1), ("predict", 1),
    ):  # fmt: skip
        for index, unit in enumerate(("exchanges, each rank", "bytes received, each rank")):
            numbers = {n: float(one["counts"][verb][index]) for n, one in found.items()}
            yield Growth(f"{verb}", unit, power * index, numbers)
    for name in ("start", "save", "failing"):
        seconds = {n: one["seconds"][name] for n, one in found.items()}
        yield Growth(f"{name}, {os.cpu_count()} cores", "seconds", None, seconds)


HEADING = (
    "| | unit | grows with | "
    + " | ".join(f"{n:,}" for n in SHOWN)
    + " | law against measured |\n"
    + "|---" * (4 + len(SHOWN))
    + "|"
)


def rows() -> Iterator[Row]:
    """Yield the same as rows of the other benchmarks: each figure with its number of ranks."""
    for growth in growths((2, 8, 32), 4):
        for size, figure in growth.measured.items():
            yield Row(
                "scaling",
                f"{growth.what}, {size} ranks",
                "fitkit",
                unit=growth.unit,
                wall=Spread.of([figure]),
            )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=8, help="at most (default: 8)")
    given = parser.parse_args()
    print(HEADING, flush=True)
    for growth in growths(THREADS, given.processes):
        print(growth.line(), flush=True)
        print(f"  {growth.measured}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    assert dist.is_available()
    main()
