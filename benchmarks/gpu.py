"""Training, evaluating and predicting on a GPU against loops written by hand, as tables.

python -m benchmarks.gpu                        # some five minutes on a GPU
python -m benchmarks.gpu --nets mlp --quick     # a rough look
python -m benchmarks.gpu --device cpu --quick   # only whether it runs: these figures mean nothing

`make test-gpu` runs it after the tests that need a GPU. Rows come in the order of what people ask
for first, and those that don't fit into `--minutes` are named at the end.

The tuned loop is what somebody writes who knows: fused Adam, pinned batches copied without waiting,
losses summed on the device, autocast and a GradScaler where the precision asks for them,
`torch.compile` where the row says so, with its own CUDA graphs in the rows "graph". The usual loop
copies each batch, waits, and reads `loss.item()` in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

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
        verb: one of `VERBS`.
    """

    task: Task
    precision: str
    mode: str
    device: torch.device
    steps: int
    verb: str = "fit"

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
    step = tuned_step(net, setting)
    batches = setting.batches()

    def epoch() -> None:
        total = torch.zeros((), device=setting.device)
        for x, y in batches:
            total += step(
                x.to(setting.device, non_blocking=True), y.to(setting.device, non_blocking=True)
            )
        total.item()

    return epoch


def tuned_step(
    net: nn.Module, setting: Setting
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the update by a batch that is on the device; it returns the loss."""
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    half = PRECISIONS[setting.precision][2]
    scaler = torch.amp.GradScaler(setting.device.type, enabled=half is torch.float16)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
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
        return loss.detach()

    return step


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


def tuned_evaluation(setting: Setting) -> Epoch:
    """Loss and accuracy over all samples, summed on the device."""
    net = setting.net().to(setting.device).eval()
    half = PRECISIONS[setting.precision][2]
    batches = setting.batches()

    def epoch() -> None:
        total = torch.zeros((), device=setting.device)
        right = torch.zeros((), device=setting.device)
        with torch.inference_mode(), autocast(setting.device, half):
            for host_x, host_y in batches:
                x = host_x.to(setting.device, non_blocking=True)
                y = host_y.to(setting.device, non_blocking=True)
                output = net(x)
                total += nn.functional.cross_entropy(output.float(), y)
                right += (output.argmax(1) == y).sum()
        _ = total.item(), right.item()

    return epoch


def tuned_prediction(setting: Setting) -> Epoch:
    """All outputs, in main memory: copied beside the next batch's work, into pinned memory."""
    net = setting.net().to(setting.device).eval()
    half = PRECISIONS[setting.precision][2]
    batches = setting.batches()

    def epoch() -> None:
        outputs = []
        with torch.inference_mode(), autocast(setting.device, half):
            for host_x, _ in batches:
                output = net(host_x.to(setting.device, non_blocking=True)).float()
                outputs.append(output.to("cpu", non_blocking=True))
        wait(setting.device)
        torch.cat(outputs).numpy()

    return epoch


def compiled_by_fitkit(setting: Setting) -> fitkit.Model:
    """Return a model with what the row says and nothing else."""
    model = fitkit.Model(setting.net())
    precision, products, _ = PRECISIONS[setting.precision]
    model.compile(
        "adam",
        "cross_entropy",
        metrics=["accuracy"] if setting.verb == "evaluate" else None,
        accelerator="gpu" if setting.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        matmul_precision=products,
        jit_compile=MODES[setting.mode] if setting.mode != "plain" else False,
    )
    return model


def by_fitkit(setting: Setting) -> Epoch:
    """Return the verb, with nothing that the loop doesn't do."""
    model, batches = compiled_by_fitkit(setting), setting.batches()
    if setting.verb == "evaluate":
        return lambda: discard(model.evaluate(batches, verbose=0))
    if setting.verb == "predict":
        return lambda: discard(model.predict(batches, verbose=0))
    return lambda: Clock.of_last_epoch(model, batches)


def discard(_: object) -> None:
    """Take what a verb returns, for an `Epoch` returns nothing."""


VERBS: dict[str, Callable[[Setting], Epoch]] = {
    "fit": tuned, "evaluate": tuned_evaluation, "predict": tuned_prediction,
}  # fmt: skip
"""The verb, and the loop of somebody who knows."""


class Clock(fitkit.callbacks.Callback):
    """Times the last of a fit's epochs: what a fit does once isn't a step's."""

    epochs = 2
    seconds = 0.0

    @staticmethod
    def of_last_epoch(model: fitkit.Model, *data: Any, **arguments: Any) -> None:
        """Train; what the last epoch took is in `Clock.seconds`."""
        model.fit(*data, epochs=Clock.epochs, verbose=0, callbacks=[Clock()], **arguments)

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
    """Return the part of an epoch's time in which the GPU computes nothing, where torch sees it."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        return None
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


class Peak:
    """The most memory that a loop takes on the device, in bytes: its net, optimizer and batches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = self._held()

    def _held(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def of(self, epoch: Epoch) -> int:
        """Run the loop, once to have all that stays, and measure the second time."""
        epoch()
        if self.device.type != "cuda":
            return 1
        torch.cuda.reset_peak_memory_stats(self.device)
        epoch()
        return torch.cuda.max_memory_allocated(self.device) - self._before


def measured(setting: Setting, turns: int) -> list[str]:
    """Return a row's figures."""
    products = PRECISIONS[setting.precision][1]
    made: dict[str, Callable[[Setting], Epoch]] = {
        "tuned": VERBS[setting.verb], "fitkit": by_fitkit
    }  # fmt: skip
    if setting.mode == "plain" and setting.verb == "fit":
        made["usual"] = usual
    # fitkit sets the precision of products for its own calls; the loops get it from here.
    with MATMUL_PRECISION.held(products):
        runs, peaks = {}, {}
        for name, make in made.items():
            peak = Peak(setting.device)
            runs[name] = make(setting)
            peaks[name] = peak.of(runs[name])
        took = alternately(runs, setting, turns)
        idle = idle_share(runs["fitkit"], setting.device)
    middle = {name: statistics.median(values) for name, values in took.items()}
    gain = f"{middle['usual'] / middle['fitkit']:.2f}" if "usual" in middle else ""
    return [
        f"{middle['tuned'] * 1e3:.3f}",
        f"{middle['fitkit'] * 1e3:.3f}",
        f"{ratio(took):.3f}",
        f"{peaks['fitkit'] / peaks['tuned']:.3f}" if setting.device.type == "cuda" else "",
        gain,
        "" if idle is None else f"{idle:.0%}",
    ]


def alternately(runs: dict[str, Epoch], setting: Setting, turns: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each, turn by turn, in changing order."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        names = list(runs) if turn % 2 else list(runs)[::-1]
        for name in names:
            is_fit = name == "fitkit" and setting.verb == "fit"
            seconds = seconds_of(runs[name], setting, is_fit=is_fit)
            if turn:  # the first turn compiles, and fills caches
                took[name].append(seconds)
    return took


def ratio(took: dict[str, list[float]]) -> float:
    """Fitkit's time ÷ the tuned loop's: the middle of the turns' own ratios."""
    return statistics.median(a / b for a, b in zip(took["fitkit"], took["tuned"], strict=True))


def settings_of(given: argparse.Namespace) -> Iterator[Setting]:
    """Yield the rows that are asked for, without those that the device can't have."""
    device = torch.device(given.device)

    def setting(name: str, precision: str, mode: str, verb: str) -> Setting:
        task = NETS[name](small=given.quick)
        steps = (
            4 if given.quick and device.type == "cpu" else task.steps // (4 if given.quick else 1)
        )
        return Setting(task, precision, mode, device, max(steps, 2), verb)

    for mode, precision, name in itertools.product(given.modes, given.precisions, given.nets):
        if mode == "graph" and device.type != "cuda":
            continue
        if precision == "fp16" and device.type == "cpu":
            continue
        yield setting(name, precision, mode, "fit")
        if mode == "plain" and precision == given.precisions[0]:
            for verb in ("evaluate", "predict"):
                yield setting(name, precision, mode, verb)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of two tensors; workers of a loader hand over whole batches."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.x[indices], self.y[indices])]


def as_it_is(batch: list[Any]) -> Any:
    """Return the batch that `Rows.__getitems__` made."""
    return batch[0]


def feeding(way: str, device: torch.device, turns: int, *, quick: bool) -> list[str]:
    """Return the row of a way to bring one gigabyte to the MLP: figures as `measured`'s.

    Args:
        way: `"arrays"` are kept on the device and shuffled there; a `"loader"` has four workers.
        device: where.
        turns: how often each is timed.
        quick: a thousandth of the data.
    """
    rows, size = (340, 16) if quick else (340_000, 512)
    x, y = torch.randn(rows, 784), torch.randint(0, 10, (rows,))
    setting = Setting(NETS["mlp"](), "fp32", "plain", device, -(-rows // size))
    step = tuned_step(setting.net().to(device).train(), setting)
    model = compiled_by_fitkit(setting)
    loader = DataLoader(
        Rows(x, y), size, shuffle=True, num_workers=0 if quick else 4, collate_fn=as_it_is,
        pin_memory=device.type == "cuda", persistent_workers=not quick,
    )  # fmt: skip
    resident = (x.to(device), y.to(device))

    def by_hand() -> None:
        total = torch.zeros((), device=device)
        if way == "arrays":
            for index in torch.randperm(rows, device=device).split(size):
                total += step(resident[0][index], resident[1][index])
        else:
            for on_host in loader:
                total += step(*(t.to(device, non_blocking=True) for t in on_host))
        total.item()

    def fit() -> None:
        if way == "arrays":
            Clock.of_last_epoch(model, x, y, batch_size=size)
        else:
            Clock.of_last_epoch(model, loader)

    took = alternately({"tuned": by_hand, "fitkit": fit}, setting, turns)
    middle = {name: statistics.median(values) * 1e3 for name, values in took.items()}
    return [f"{middle['tuned']:.3f}", f"{middle['fitkit']:.3f}", f"{ratio(took):.3f}", "", "", ""]


def heading(device: torch.device) -> str:
    """When, on what and with what."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{date.today()}, {name}, torch {torch.__version__}, fitkit {fitkit.__version__}"


Row = tuple[list[str], Callable[[], list[str]]]
"""A row's words, and what measures its figures."""


def rows_of(given: argparse.Namespace, turns: int) -> Iterator[Row]:
    """Yield all rows: those of steps that run as they are, of data's ways, of compiled steps."""
    device = torch.device(given.device)
    settings = list(settings_of(given))
    plain = [setting for setting in settings if setting.mode == "plain"]
    others = [setting for setting in settings if setting.mode != "plain"]
    for setting in plain:
        words = [setting.task.name, setting.verb, setting.precision, setting.mode]
        yield words, functools.partial(measured, setting, turns)
    for way in ("arrays", "loader"):
        words = ["MLP", f"fit, 1 GB by {way}", "fp32", "plain"]
        yield words, functools.partial(feeding, way, device, turns, quick=given.quick)
    for setting in others:
        words = [setting.task.name, setting.verb, setting.precision, setting.mode]
        yield words, functools.partial(measured, setting, turns)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small nets, few steps")
    parser.add_argument("--turns", type=int, help="runs of each loop")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no row after them")
    parser.add_argument("--nets", nargs="*", default=["mlp", "resnet50", "gpt"], choices=list(NETS))
    parser.add_argument(
        "--precisions", nargs="*", default=["bf16", "fp32", "fp16"], choices=list(PRECISIONS)
    )
    parser.add_argument("--modes", nargs="*", default=["plain", "compiled"], choices=list(MODES))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.exit(0, "No CUDA device: nothing measured (--device cpu --quick tries it out).\n")
    end = time.monotonic() + 60 * given.minutes
    left_out = []
    print(f"{heading(torch.device(given.device))}\n")
    print(
        "| net | verb | precision | step | tuned, ms | fitkit, ms | ratio | memory | usual / fitkit"
        " | GPU idle |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for words, measure in rows_of(given, given.turns or (2 if given.quick else 5)):
        if time.monotonic() > end:
            left_out.append(", ".join(words))
            continue
        print(f"| {' | '.join([*words, *measure()])} |", flush=True)
        torch.compiler.reset()
    if left_out:
        print(f"\nNot measured within {given.minutes:g} minutes: {'; '.join(left_out)}.")


if __name__ == "__main__":
    main()
