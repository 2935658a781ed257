"""A training step on a GPU against loops written by hand, as one table.

python -m benchmarks.gpu                        # some minutes on a GPU
python -m benchmarks.gpu --nets mlp --quick     # a rough look
python -m benchmarks.gpu --device cpu --quick   # only whether it runs: these figures mean nothing

`make test-gpu` runs it after the tests that need a GPU. The tuned loop is what somebody writes who
knows: fused Adam, pinned batches copied without waiting, losses summed on the device, autocast and
a GradScaler where the precision asks for them, `torch.compile` where the row says so, with its own
CUDA graphs in the rows "graph". The usual loop copies each batch, waits, and reads `loss.item()` in
every step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, Literal

import torch
from torch import nn

import fitkit
from benchmarks.gpu_nets import NETS, Task
from fitkit.training.torch_flags import MATMUL_PRECISION
from fitkit.typing import PrecisionName

PRECISIONS: dict[str, tuple[PrecisionName, Literal["highest", "high"], torch.dtype | None]] = {
    "fp32": ("32-true", "highest", None),
    "TF32": ("32-true", "high", None),
    "bf16": ("bf16-mixed", "highest", torch.bfloat16),
    "fp16": ("16-mixed", "highest", torch.float16),
}
"""The table's word, fitkit's two, and autocast's type."""

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"mode": "default"},
    "graph": {"mode": "reduce-overhead"},
}
"""What `torch.compile` is told; a plain net isn't compiled."""

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Epoch = Callable[[], None]


@dataclasses.dataclass
class Setting:
    """What a row measures.

    Attributes:
        task: the net and its batches.
        precision: a key of `PRECISIONS`.
        mode: one of `MODES`.
        device: where.
        steps: in an epoch.
    """

    task: Task
    precision: str
    mode: str
    device: torch.device
    steps: int

    def batches(self) -> Batches:
        """Return an epoch's batches in main memory, pinned where there is a GPU."""
        torch.manual_seed(0)
        made = [self.task.batch() for _ in range(min(self.steps, 16))]
        if self.device.type == "cuda":
            made = [(x.pin_memory(), y.pin_memory()) for x, y in made]
        return list(itertools.islice(itertools.cycle(made), self.steps))

    def net(self) -> nn.Module:
        """Return a new net, the same for all."""
        torch.manual_seed(1)
        return self.task.net()


def tuned(setting: Setting) -> Epoch:
    """Return the loop of somebody who knows."""
    net = setting.net().to(setting.device).train()
    if setting.mode != "plain":
        net = torch.compile(net, **MODES[setting.mode])  # type: ignore[assignment]
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    half = PRECISIONS[setting.precision][2]
    scaler = torch.amp.GradScaler(setting.device.type, enabled=half is torch.float16)
    batches = setting.batches()
    total = torch.zeros((), device=setting.device)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(setting.device, half):
            output = net(x)
        loss = nn.functional.cross_entropy(output.float(), y)
        if half is torch.float16:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        total.add_(loss.detach())

    def epoch() -> None:
        for x, y in batches:
            step(x.to(setting.device, non_blocking=True), y.to(setting.device, non_blocking=True))
        total.item()

    return epoch


def usual(setting: Setting) -> Epoch:
    """Return the loop as it is mostly written."""
    net = setting.net().to(setting.device).train()
    optimizer = torch.optim.Adam(net.parameters())
    half = PRECISIONS[setting.precision][2]
    scaler = torch.amp.GradScaler(setting.device.type, enabled=half is torch.float16)
    batches = [(x.clone(), y.clone()) for x, y in setting.batches()]

    def epoch() -> None:
        total = 0.0
        for host_x, host_y in batches:
            x, y = host_x.to(setting.device), host_y.to(setting.device)
            optimizer.zero_grad()
            with autocast(setting.device, half):
                output = net(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()

    return epoch


def by_fitkit(setting: Setting) -> Epoch:
    """`model.fit`, with what the row says and nothing else."""
    model = fitkit.Model(setting.net())
    precision, products, _ = PRECISIONS[setting.precision]
    model.compile(
        "adam",
        "cross_entropy",
        accelerator="gpu" if setting.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        matmul_precision=products,
        jit_compile=MODES[setting.mode] if setting.mode != "plain" else False,
    )
    batches = setting.batches()
    return lambda: Clock.of_last_epoch(model, batches)


class Clock(fitkit.callbacks.Callback):
    """Times the last of a fit's epochs: what a fit does once isn't a step's."""

    epochs = 2
    seconds = 0.0

    @staticmethod
    def of_last_epoch(model: fitkit.Model, batches: Batches) -> None:
        """Train; what the last epoch took is in `Clock.seconds`."""
        model.fit(batches, epochs=Clock.epochs, verbose=0, callbacks=[Clock()])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        wait(self.model.device)
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        wait(self.model.device)
        Clock.seconds = time.perf_counter() - self._began


def autocast(
    device: torch.device, half: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """Autocast to a half type; nothing where there is none."""
    return contextlib.nullcontext() if half is None else torch.autocast(device.type, half)


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(epoch: Epoch, setting: Setting, *, is_fit: bool) -> float:
    """Return what a step took, in one run."""
    wait(setting.device)
    began = time.perf_counter()
    epoch()
    wait(setting.device)
    whole = Clock.seconds if is_fit else time.perf_counter() - began
    return whole / setting.steps


def idle_share(epoch: Epoch, device: torch.device) -> float | None:
    """Return the part of an epoch's time in which the GPU computes nothing; None without a GPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    wait(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        epoch()
        wait(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1.0 - busy / (spans[-1][1] - spans[0][0]) if spans else None


def measured(setting: Setting, turns: int) -> list[str]:
    """Return a row's figures."""
    products = PRECISIONS[setting.precision][1]
    # fitkit sets the precision of products for its own calls; the loops get it from here.
    with MATMUL_PRECISION.held(products):
        runs: dict[str, Epoch] = {"tuned": tuned(setting), "fitkit": by_fitkit(setting)}
        if setting.mode == "plain":
            runs["usual"] = usual(setting)
        took: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(turns + 1):
            names = list(runs) if turn % 2 else list(runs)[::-1]
            for name in names:
                seconds = seconds_of(runs[name], setting, is_fit=name == "fitkit")
                if turn:  # the first turn compiles, and fills caches
                    took[name].append(seconds)
        idle = idle_share(runs["fitkit"], setting.device)
    middle = {name: statistics.median(values) for name, values in took.items()}
    pairs = [a / b for a, b in zip(took["fitkit"], took["tuned"], strict=True)]
    gain = f"{middle['usual'] / middle['fitkit']:.2f}" if "usual" in middle else ""
    return [
        f"{middle['tuned'] * 1e3:.3f}",
        f"{middle['fitkit'] * 1e3:.3f}",
        f"{statistics.median(pairs):.3f}",
        gain,
        "" if idle is None else f"{idle:.0%}",
    ]


def settings_of(given: argparse.Namespace) -> Iterator[Setting]:
    """Yield the rows that are asked for, without those that the device can't have."""
    device = torch.device(given.device)
    steps = 4 if given.quick and device.type == "cpu" else 50 if given.quick else 200
    for name, precision, mode in itertools.product(given.nets, given.precisions, given.modes):
        if mode == "graph" and device.type != "cuda":
            continue
        if precision == "fp16" and device.type == "cpu":
            continue
        yield Setting(NETS[name](small=given.quick), precision, mode, device, steps)


def heading(device: torch.device) -> str:
    """When, on what and with what."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{date.today()}, {name}, torch {torch.__version__}, fitkit {fitkit.__version__}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small nets, few steps")
    parser.add_argument("--turns", type=int, help="runs of each loop")
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=list(NETS))
    parser.add_argument(
        "--precisions", nargs="*", default=list(PRECISIONS), choices=list(PRECISIONS)
    )
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.exit(0, "No CUDA device: nothing measured (--device cpu --quick tries it out).\n")
    turns = given.turns or (2 if given.quick else 9)
    print(f"{heading(torch.device(given.device))}\n")
    print("| net | precision | step | tuned, ms | fitkit, ms | ratio | usual / fitkit | GPU idle |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in settings_of(given):
        row = [setting.task.name, setting.precision, setting.mode, *measured(setting, turns)]
        print(f"| {' | '.join(row)} |", flush=True)
        torch.compiler.reset()


if __name__ == "__main__":
    main()
