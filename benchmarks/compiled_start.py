"""CPU seconds until a net is compiled: `jit_compile` beside `torch.compile` of the net.

`python -m benchmarks.compiled_start [mlp cnn transformer]`. Each contender is a process of its own,
with an empty cache of torch's compiler (cold), then the same once more (warm). What it prints is
the first fit less the second, in CPU seconds of the process and of its children (g++). Of two ranks
under torchrun, these are both ranks' together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import fitkit

BATCHES = 24
HOWS = ["torch.compile", "jit", "remainder", "x8", "ranks"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Transformer(nn.Module):
    """Two layers of 128 numbers a token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.enter, self.out = nn.Embedding(100, 128), nn.Linear(128, 10)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.enter(x)).mean(1))


def mlp() -> tuple[nn.Module, torch.Tensor, int]:
    layers = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers), torch.randn(BATCHES * 128, 784), 128


def cnn() -> tuple[nn.Module, torch.Tensor, int]:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip
    return net, torch.randn(BATCHES * 64, 1, 28, 28), 64


def transformer() -> tuple[nn.Module, torch.Tensor, int]:
    return Transformer(), torch.randint(100, (BATCHES * 32, 64)), 32


NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, int]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}


def seconds() -> tuple[float, float]:
    """CPU seconds of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), children.ru_utime + children.ru_stime


def contend(name: str, how: str) -> None:
    """Print a contender's CPU seconds until it is compiled."""
    torch.manual_seed(0)
    net, x, size = NETS[name]()
    if how == "remainder":
        x = x[: -size // 2]
    y = torch.randint(10, (len(x),))
    if how == "torch.compile":
        call, optimizer = torch.compile(net), torch.optim.Adam(net.parameters())

        def fit() -> None:
            for start in range(0, len(x), size):
                optimizer.zero_grad()
                output = call(x[start : start + size])
                nn.functional.cross_entropy(output, y[start : start + size]).backward()
                optimizer.step()
    else:
        model = fitkit.Model(net)
        together, devices = 8 if how == "x8" else 1, 2 if how == "ranks" else 1
        model.compile("adam", "cross_entropy", accelerator="cpu", devices=devices, jit_compile=True,
                      steps_per_execution=together)  # fmt: skip

        def fit() -> None:
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)

    marks = [seconds()]
    for _ in range(2):
        fit()
        marks.append(seconds())
    (own, theirs), (first, given), (second, last) = marks
    print(json.dumps([2 * first - own - second, 2 * given - theirs - last]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--how", nargs="*", default=HOWS)
    parser.add_argument("--contend", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend:
        contend(*given.nets, *given.how)
        return
    with tempfile.TemporaryDirectory() as folder:
        probed = f"{folder}/probed"  # torch asks the CPU once for all contenders
        probe = "from torch._inductor.cpu_vec_isa import pick_vec_isa; pick_vec_isa()"
        _run([sys.executable, "-c", probe], probed)
        for name in given.nets:
            for how in given.how:
                cache = f"{folder}/{name}-{how}"
                shutil.copytree(probed, cache)
                for start in ("cold", "warm"):
                    launched = TORCHRUN if how == "ranks" else []
                    command = ["-m", "benchmarks.compiled_start", name, "--how", how, "--contend"]
                    told = _run([sys.executable, *launched, *command], cache)
                    ranks = [json.loads(line) for line in told if line.startswith("[")]
                    own, theirs = map(sum, zip(*ranks, strict=True))
                    print(f"{name:12} {how:14} {start}  self {own:5.1f}  children {theirs:5.1f}",
                          f"sum {own + theirs:5.1f}", flush=True)  # fmt: skip


def _run(command: list[str], cache: str) -> list[str]:
    """Run a command with a cache of torch's compiler, and return what it printed."""
    os.makedirs(cache, exist_ok=True)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.splitlines()


if __name__ == "__main__":
    main()
