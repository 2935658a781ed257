"""From the start of a process to the end of its first training step, for each launcher.

    python benchmarks/start_up.py               # about two minutes
    python benchmarks/start_up.py --rounds 2

Each round starts each launcher once, in turns; raw PyTorch under torchrun for comparison. The data
are in memory. Workers stay for the next call: a second `fit` of one step is measured, too. CPU time
is that of the whole run and all its processes; trust it where other programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHERS: dict[str, list[str]] = {
    "raw, one process": [],
    "fit, one process": [],
    "raw, torchrun": TORCHRUN,
    "fit, torchrun": TORCHRUN,
    "fit, ddp_spawn": [],
    "fit, ddp": [],
}


def raw() -> dict[str, float]:
    """One hand-written step, under torchrun with DDP."""
    import torch

    net: torch.nn.Module = torch.nn.Linear(784, 10)
    distributed = "RANK" in os.environ
    if distributed:
        torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(64, 784), torch.randint(10, (64,))
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    first = time.time()
    if distributed:
        torch.distributed.destroy_process_group()
    return {"first": first, "second": 0.0}


def with_fitkit(strategy: str | None) -> dict[str, float]:
    """One step of `fit`, then another call."""
    import torch

    import fitkit
    from fitkit.typing import Name

    torch.manual_seed(0)
    x, y = torch.randn(128, 784), torch.randint(10, (128,))
    model = fitkit.Model(torch.nn.Linear(784, 10))
    if strategy is None:
        devices = "auto" if "RANK" in os.environ else 1
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=devices)
    else:
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2, strategy=Name(strategy))
    moments: list[float] = []
    watch = fitkit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: moments.append(time.time())
    )
    model.fit(x, y, batch_size=64, steps_per_epoch=1, verbose=0, callbacks=watch)
    began = time.perf_counter()
    model.fit(x, y, batch_size=64, steps_per_epoch=1, verbose=0)
    return {"first": moments[0], "second": time.perf_counter() - began}


def side(name: str) -> None:
    """Do what a started process does; rank 0 prints its moments."""
    kind, launcher = name.split(", ")
    if kind == "raw":
        found = raw()
    else:
        found = with_fitkit(launcher if launcher.startswith("ddp") else None)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))


def run(name: str) -> dict[str, float]:
    """One start of a launcher."""
    began, cpu_before = time.time(), cpu_of_children()
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[name], __file__, "--side", name],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    found["first"] -= began
    return {**found, "cpu": cpu_of_children() - cpu_before}


def cpu_of_children() -> float:
    """Seconds of CPU of all processes started so far that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=list(LAUNCHERS), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each launcher")
    arguments = parser.parse_args()
    if arguments.side:
        side(arguments.side)
        return
    rounds = [{name: run(name) for name in LAUNCHERS} for _ in range(arguments.rounds)]
    for name in LAUNCHERS:
        firsts = [found[name]["first"] for found in rounds]
        second = statistics.median(found[name]["second"] for found in rounds)
        cpu = statistics.median(found[name]["cpu"] for found in rounds)
        middle, spread = statistics.median(firsts), f"[{min(firsts):.2f} .. {max(firsts):.2f}]"
        again = f"   second call {second * 1e3:6.1f} ms" if second else ""
        print(f"{name:18s} {middle:5.2f} s {spread}   CPU {cpu:5.2f} s{again}")


if __name__ == "__main__":
    main()
