"""DDP on two gloo processes: a step of fit against the raw loop, both under torchrun.

    python -m benchmarks ddp
    python -m benchmarks.ddp --profile      # where the time of fit goes on rank 0

Both train the same small convolutional net on the same data in the same two processes, an epoch
each in turns (A B, B A, …), with one thread: so what else the machine does meets both alike. How a
process's memory happens to lie may favour one of them by some hundredths for as long as it lives.
So six pairs of epochs are all that two processes make; then others follow, in every second of
which `fit` has its net and data first. The first epoch isn't counted, nor what a call of `fit` does
before and after its epoch. CPU time is that of rank 0's process with all its threads.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fitkit
from benchmarks.measuring import Row, Seconds, Spread, in_turns, row_of

STEPS, BATCH = 50, 64
PAIRS_A_LAUNCH = 6
EXCHANGES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")
ROOT = Path(__file__).parents[1]


def small_net() -> nn.Module:
    """Return a convolutional net of about 20 thousand parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


def data() -> TensorDataset:
    """Random images for both ranks together."""
    torch.manual_seed(1)
    count = STEPS * BATCH * 2
    return TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,)))


def raw_loop() -> Callable[[], Seconds]:
    """Return an epoch of the hand-written loop."""
    net = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    dataset = data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))

    def epoch() -> Seconds:
        dist.barrier()
        started, total = now(), torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return since(started)

    return epoch


class Watch(fitkit.callbacks.Callback):
    """Measures an epoch, and the exchanges in it that Python code asks for; DDP's own are C++'s."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.found = Seconds(0.0, 0.0)
        for name in EXCHANGES:
            setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, exchange: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.exchanges += 1
            return exchange(*arguments, **options)

        return counted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        dist.barrier()
        self.exchanges, self._started = 0, now()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found = since(self._started)


def with_fitkit(watch: Watch, profile: bool = False) -> Callable[[], Seconds]:
    """Return an epoch of the same by fit."""
    model = fitkit.Model(small_net())
    model.compile(
        "sgd", "cross_entropy", learning_rate=0.01, accelerator="cpu", devices=2, strategy="ddp"
    )
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)

    def epoch() -> Seconds:
        model.fit(loader, verbose=0, callbacks=watch)
        return watch.found

    epoch()
    if profile:
        with cProfile.Profile() as profiler:
            epoch()
        if dist.get_rank() == 0:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return epoch


def now() -> Seconds:
    """Return the clock and this process's CPU time."""
    return Seconds(time.perf_counter(), time.process_time())


def since(started: Seconds) -> Seconds:
    """Return what has passed on both, per step."""
    ended = now()
    return Seconds((ended.wall - started.wall) / STEPS, (ended.cpu - started.cpu) / STEPS)


def side_by_side(pairs: int, profile: bool, fit_first: bool) -> None:
    """On each rank: epochs of both in turns. Rank 0 prints what it measured, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    watch = Watch()
    if fit_first:
        fit, raw = with_fitkit(watch, profile), raw_loop()
    else:
        raw, fit = raw_loop(), with_fitkit(watch, profile)
    raw()
    found = in_turns(raw, fit, pairs)
    if dist.get_rank() == 0:
        times = [[(each.wall, each.cpu) for each in pair] for pair in found]
        print(json.dumps({"pairs": times, "exchanges": watch.exchanges}))
    dist.destroy_process_group()


def run(*options: str) -> str:
    """Return what rank 0 prints of a run under torchrun."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         __file__, *options],
        capture_output=True, text=True, timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def rows(launches: int) -> Iterator[Row]:
    """Yield the raw loop's and fit's; of an even number of launches, each is made first equally
    often.
    """
    found, exchanges = [], 0
    for number in range(launches):
        order = ["--fit-first"] if number % 2 else []
        told = json.loads(run("--pairs", str(PAIRS_A_LAUNCH), *order).strip().splitlines()[-1])
        found += [(Seconds(*raw), Seconds(*fit)) for raw, fit in told["pairs"]]
        exchanges = max(exchanges, told["exchanges"])
    names: dict[str, Any] = {"scenario": "ddp", "task": "2 processes, CNN, batches of 64"}
    yield Row(
        **names,
        contender="raw loop",
        wall=Spread.of([raw.wall * 1e6 for raw, _ in found]),
        cpu=Spread.of([raw.cpu * 1e6 for raw, _ in found]),
    )
    row = row_of(found, 1e6, **names, contender="fitkit", reference="raw loop")
    row.note = f"{exchanges} exchanges but DDP's in an epoch of {STEPS} steps"
    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fit-first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="profile fit")
    arguments = parser.parse_args()
    if arguments.pairs is None:
        print(run("--pairs", "1", *(["--profile"] if arguments.profile else [])))
    else:
        side_by_side(arguments.pairs, arguments.profile, arguments.fit_first)


if __name__ == "__main__":
    main()
