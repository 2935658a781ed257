"""DDP on two gloo processes: a step of fit against the raw loop under torchrun.

    python benchmarks/ddp.py                # about three minutes
    python benchmarks/ddp.py --rounds 2     # rougher
    python benchmarks/ddp.py --profile      # where the time of fit goes on rank 0

Both sides train the same small convolutional net on the same data, in turns (A B A B …), each in
processes of its own with one thread. The first epoch isn't counted. CPU time is that of rank 0's
process with all its threads, and is to be trusted where other programs run. Ratios are of pairs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH, EPOCHS = 100, 64, 4


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

    def begin(epoch: int, logs: object) -> None:
        began[:] = [time.perf_counter(), time.process_time()]

    def end(epoch: int, logs: object) -> None:
        seconds.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])

    model = fitkit.Model(small_net())
    model.compile("sgd", "cross_entropy", learning_rate=0.01, accelerator="cpu", devices=2)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    watch = fitkit.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
    model.fit(loader, epochs=EPOCHS, verbose=0, callbacks=watch)
    if profile:
        with cProfile.Profile() as profiler:
            model.fit(loader, epochs=EPOCHS, verbose=0)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return per_step(seconds, cpu)


def run(side: str) -> dict[str, float]:
    """One run of a side in fresh processes; what its rank 0 measured."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(launcher if side == "raw" else []), __file__, "--side", side]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=["raw", "fitkit"], help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--profile", action="store_true", help="profile fit instead")
    arguments = parser.parse_args()
    if arguments.profile:
        torch.set_num_threads(1)
        with_fitkit(profile=True)
        return
    if arguments.side:
        torch.set_num_threads(1)
        found = raw() if arguments.side == "raw" else with_fitkit()
        if found:
            print(json.dumps(found))
        return
    pairs = [(run("raw"), run("fitkit")) for _ in range(arguments.rounds)]
    for name in ("wall", "cpu"):
        ratios = [ours[name] / theirs[name] for theirs, ours in pairs]
        theirs = statistics.median(pair[0][name] for pair in pairs)
        ours = statistics.median(pair[1][name] for pair in pairs)
        print(
            f"{name:4s} µs per step  raw {theirs:9.2f}   fitkit {ours:9.2f}   ratio "
            f"{statistics.median(ratios):.3f} [{min(ratios):.3f} .. {max(ratios):.3f}]"
        )


if __name__ == "__main__":
    main()
