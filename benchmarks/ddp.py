"""DDP on two gloo processes: a step of fit against the raw loop under torchrun.

    python -m benchmarks ddp
    python -m benchmarks.ddp --profile      # where the time of fit goes on rank 0

Both sides train the same small convolutional net on the same data, in turns (A B, B A, …), each in
processes of its own with one thread. The first epoch isn't counted. CPU time is that of rank 0's
process with all its threads, and is to be trusted where other programs run.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import Row, Seconds, Spread, in_turns, row_of

STEPS, BATCH, EPOCHS = 100, 64, 3
EXCHANGES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")
ROOT = Path(__file__).parents[1]


def small_net() -> nn.Module:
    """A convolutional net of about 40 thousand parameters."""
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


def raw() -> dict[str, float]:
    """The hand-written loop; torchrun starts it on each rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    net = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    dataset = data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
    seconds, cpu = [], []
    for _ in range(EPOCHS):
        started, total = (time.perf_counter(), time.process_time()), torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        seconds.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    rank = dist.get_rank()
    dist.destroy_process_group()
    return per_step(seconds, cpu) if rank == 0 else {}


def per_step(seconds: list[float], cpu: list[float]) -> dict[str, float]:
    """Microseconds of a step in the best epoch but the first."""
    return {"wall": min(seconds[1:]) / STEPS * 1e6, "cpu": min(cpu[1:]) / STEPS * 1e6}


def with_fitkit(profile: bool = False) -> dict[str, float]:
    """The same by fit, from a plain script."""
    import fitkit

    seconds: list[float] = []
    cpu: list[float] = []
    began = [0.0, 0.0]
    exchanges = counted_exchanges()
    counts: list[int] = []

    def begin(epoch: int, logs: object) -> None:
        exchanges[0] = 0
        began[:] = [time.perf_counter(), time.process_time()]

    def end(epoch: int, logs: object) -> None:
        seconds.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
        counts.append(exchanges[0])

    model = fitkit.Model(small_net())
    model.compile("sgd", "cross_entropy", learning_rate=0.01, accelerator="cpu", devices=2)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    watch = fitkit.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
    model.fit(loader, epochs=EPOCHS, verbose=0, callbacks=watch)
    if profile:
        with cProfile.Profile() as profiler:
            model.fit(loader, epochs=EPOCHS, verbose=0)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return {**per_step(seconds, cpu), "exchanges": counts[-1]}


def counted_exchanges() -> list[int]:
    """A list whose entry counts the exchanges that Python code asks for; DDP's own are C++'s."""
    import torch.distributed as dist

    count = [0]

    def counting(exchange: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            return exchange(*arguments, **options)

        return counted

    for name in EXCHANGES:
        setattr(dist, name, counting(getattr(dist, name)))
    return count


def run(side: str) -> dict[str, float]:
    """One run of a side in fresh processes; what its rank 0 measured."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *(launcher if side == "raw" else []), __file__, "--side", side]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def rows(pairs: int) -> Iterator[Row]:
    """The raw loop's and fit's."""
    answers: dict[str, dict[str, float]] = {}

    def seconds(side: str) -> Seconds:
        answers[side] = run(side)
        return Seconds(answers[side]["wall"], answers[side]["cpu"])

    found = in_turns(lambda: seconds("raw"), lambda: seconds("fitkit"), pairs)
    names: dict[str, Any] = {"scenario": "ddp", "task": "2 processes, CNN, batches of 64"}
    yield Row(
        **names,
        contender="torchrun",
        wall=Spread.of([raw.wall for raw, _ in found]),
        cpu=Spread.of([raw.cpu for raw, _ in found]),
    )
    row = row_of(found, 1.0, **names, contender="fitkit", reference="torchrun")
    row.note = f"{answers['fitkit']['exchanges']:.0f} exchanges but DDP's in {STEPS} steps"
    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--side", choices=["raw", "fitkit"], help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="profile fit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = raw() if arguments.side == "raw" else with_fitkit(profile=arguments.profile)
    if found:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
