"""What Bagua's algorithms send and learn: bytes counted on the wire, digits after equal epochs.

Run as root: `python benchmarks/bagua.py [ranks …]`. The script starts itself again in a network
namespace of its own, in which nobody else sends anything, and reads the kernel's counters of its
loopback device. A step's bytes are those of all ranks together, with TCP's headers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import fitkit
from fitkit.callbacks import Callback
from fitkit.optimizers import QAdamOptimizer
from fitkit.strategies import BaguaStrategy, DDPSpawnStrategy, Strategy

INSIDE = "FITKIT_COUNTED_NETWORK"
BATCH = 64
EPOCHS = 6
WARM_UP = 30
STEPS = (46, 64)
"""Between which updates bytes are counted: after all warm-ups, within an epoch (of 22)."""

RUNS: dict[str, tuple[Any, Any]] = {
    "ddp": (DDPSpawnStrategy, {}),
    "gradient_allreduce": (BaguaStrategy, {}),
    "bytegrad": (BaguaStrategy, {}),
    "decentralized": (BaguaStrategy, {}),
    "decentralized, shift_one": (BaguaStrategy, {"peer_selection_mode": "shift_one"}),
    "low_precision_decentralized": (BaguaStrategy, {}),
    "async": (BaguaStrategy, {"sync_interval_ms": 20, "warmup_steps": WARM_UP}),
    "post_local_sgd": (BaguaStrategy, {"warmup_steps": WARM_UP, "period": 4}),
    "ddp, adam": (DDPSpawnStrategy, {}),
    "qadam": (BaguaStrategy, {}),
    "ddp, comm_hook=bf16": (DDPSpawnStrategy, {"comm_hook": "bf16"}),
    "ddp, comm_hook=powersgd": (
        DDPSpawnStrategy,
        {
            "comm_hook": "powersgd",
            "comm_hook_state": {"start_powerSGD_iter": WARM_UP, "matrix_approximation_rank": 2},
        },
    ),
}


class Counter(Callback):
    """Reads the loopback device's counter at two updates."""

    stops_alike = True

    def __init__(self) -> None:
        self.updates = 0
        self.read: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.updates += 1
        if self.updates in STEPS:
            self.read.append(bytes_sent())


def bytes_sent() -> int:
    """Return what the loopback device has carried so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("There is no loopback device.")


def strategy_of(name: str) -> Strategy:
    maker, options = RUNS[name]
    if maker is BaguaStrategy:
        options = {"algorithm": name.split(",")[0], **options}
    found: Strategy = maker(timeout=60, **options)
    return found


def optimizer_of(name: str) -> Any:
    if name == "qadam":
        return lambda parameters: QAdamOptimizer(parameters, lr=2e-3, warmup_steps=WARM_UP)
    if name.endswith("adam"):
        return lambda parameters: torch.optim.Adam(parameters, lr=2e-3)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def measure(name: str, ranks: int) -> str:
    """Return a table's row."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )
    model, counter = fitkit.Model(net), Counter()
    model.compile(
        optimizer_of(name), "cross_entropy", metrics=["accuracy"], accelerator="cpu",
        devices=ranks, strategy=strategy_of(name),
    )  # fmt: skip
    model.fit(
        x[:1400], y[:1400], batch_size=BATCH // ranks, epochs=EPOCHS, shuffle=False, verbose=0,
        callbacks=[counter],
    )  # fmt: skip
    loss, accuracy = model.evaluate(x[1400:], y[1400:], verbose=0)
    kilobytes = (counter.read[1] - counter.read[0]) / (STEPS[1] - STEPS[0]) / 1000
    return f"| {name} | {ranks} | {kilobytes:.0f} | {loss:.3f} | {accuracy:.3f} |"


def main() -> None:
    if INSIDE not in os.environ:
        command = f"ip link set lo up && exec {sys.executable} {' '.join(sys.argv)}"
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", command])
    print("| run | ranks | kB a step | loss | accuracy |\n|---|---|---|---|---|")
    for ranks in [int(argument) for argument in sys.argv[1:]] or [2, 4]:
        for name in RUNS:
            print(measure(name, ranks), flush=True)


if __name__ == "__main__":
    main()
