"""Saving and loading 100 million parameters: fitkit against torch.save and safetensors.

    python -m benchmarks checkpoint                      # the times alone
    python -m benchmarks.checkpoints                     # memory too: about two minutes
    python -m benchmarks.checkpoints --folder /dev/shm   # without the disk

Every way to save is followed by fsync, as fitkit's are, but the one that says otherwise. Every load
ends with the weights in a module that was there before, once with the file in the system's cache
and once without. The ways take turns; shown are the median and the best of the rounds and their
ratios to safetensors (on a machine that does other work too, the best is nearer to the truth), and
the median of what all threads together have computed, the system's part included. What a load takes
in memory beyond the module is measured in processes of their own, as anonymous memory: mapped pages
of a file belong to the system's cache, which gives them up when memory is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.measuring import Row, Spread
from fitkit.checkpoint import load_weights, open_checkpoint, save_checkpoint, save_weights


def net(layers: int) -> nn.Module:
    """Return transformer layers of 7.1 million parameters each."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def fsync(path: Path) -> None:
    """Force a file to the disk, as fitkit does by itself."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def torch_save(path: Path, module: nn.Module) -> None:
    """`torch.save` of the state dict."""
    torch.save(module.state_dict(), path)
    fsync(path)


def torch_load(path: Path, module: nn.Module) -> None:
    """`torch.load` as it is mostly called."""
    module.load_state_dict(torch.load(path, weights_only=True))


def torch_load_mapped(path: Path, module: nn.Module) -> None:
    """`torch.load` with `mmap=True`."""
    module.load_state_dict(torch.load(path, weights_only=True, mmap=True))


def safetensors_save(path: Path, module: nn.Module) -> None:
    """Write by the package's own writer."""
    from safetensors.torch import save_file

    save_file(module.state_dict(), path)
    fsync(path)


def safetensors_save_unsafely(path: Path, module: nn.Module) -> None:
    """Write by the package's own writer alone: after a power cut the file may be empty."""
    from safetensors.torch import save_file

    save_file(module.state_dict(), path)


def safetensors_load(path: Path, module: nn.Module) -> None:
    """Read by the package's own reader, which maps the file and checks no digest."""
    from safetensors.torch import load_file

    module.load_state_dict(load_file(path))


def fitkit_save(path: Path, module: nn.Module) -> None:
    """`save_weights`."""
    save_weights(path, module.state_dict())


def fitkit_load(path: Path, module: nn.Module) -> None:
    """`load_weights`, which checks the digest."""
    load_weights(path, module)


Way = Callable[[Path, nn.Module], None]
SAVES: dict[str, tuple[str, Way]] = {
    "safetensors": ("a.safetensors", safetensors_save),
    "safetensors, without fsync": ("c.safetensors", safetensors_save_unsafely),
    "torch.save": ("a.pt", torch_save),
    "fitkit .h5": ("b.h5", fitkit_save),
    "fitkit .safetensors": ("b.safetensors", fitkit_save),
    "fitkit .pt": ("b.pt", fitkit_save),
}
LOADS: dict[str, tuple[str, Way]] = {
    "safetensors": ("a.safetensors", safetensors_load),
    "torch.load": ("a.pt", torch_load),
    "torch.load, mmap": ("a.pt", torch_load_mapped),
    "fitkit .h5": ("b.h5", fitkit_load),
    "fitkit .safetensors, with digest": ("b.safetensors", fitkit_load),
    "fitkit .safetensors, of the package": ("a.safetensors", fitkit_load),
    "fitkit .pt": ("b.pt", fitkit_load),
}


def forget(path: Path) -> None:
    """Take a file out of the system's cache, so that the disk has to give it again."""
    if path.exists() and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    ways: dict[str, tuple[str, Way]],
    folder: Path,
    module: nn.Module,
    rounds: int,
    *,
    cold: bool = False,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each way in each round, by the clock and computed; the first isn't counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    computed: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways) if number % 2 else list(reversed(ways))
        for name in names:
            file, way = ways[name]
            if cold:
                forget(folder / file)
            started, before = time.perf_counter(), time.process_time()
            way(folder / file, module)
            if number:
                seconds[name].append(time.perf_counter() - started)
                computed[name].append(time.process_time() - before)
    return seconds, computed


def peak_bytes(action: Callable[[], None]) -> int:
    """How much anonymous memory `action` takes at its highest, beyond what was there."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    done = threading.Event()
    before = anonymous()
    highest = [before]

    def watch() -> None:
        while not done.wait(0.001):
            highest[0] = max(highest[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        action()
    finally:
        done.set()
        thread.join()
    return max(highest[0], anonymous()) - before


def peak_of_load(name: str, folder: Path, layers: int) -> float:
    """Return the peak of a load in a process of its own, in MB."""
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--peak", name]
    command += ["--folder", str(folder), "--layers", str(layers)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(result.stdout)


def report_peak(name: str, folder: Path, layers: int) -> None:
    """Do what `peak_of_load` runs."""
    module = net(layers)
    file, way = LOADS[name]
    small = nn.Linear(2, 2)  # what is imported and started at the first load isn't counted
    way_file = folder / f"small{Path(file).suffix}"
    torch.save(small.state_dict(), way_file) if way_file.suffix == ".pt" else save_weights(
        way_file, small.state_dict()
    )
    way(way_file, small)
    print(peak_bytes(lambda: way(folder / file, module)) / 1e6)


def show(
    console: Console,
    title: str,
    measured: tuple[dict[str, list[float]], dict[str, list[float]]],
    extra: dict[str, str],
) -> None:
    """Print a table of one kind of measurement."""
    peak = ["peak MB"] if extra else []
    table = Table("", "median s", "ratio", "best s", "ratio", "computed s", *peak)
    seconds, computed = measured
    reference = seconds["safetensors"]
    for name, values in seconds.items():
        cells = [
            *(f"{statistics.median(values):.3f}", _ratio(values, reference, statistics.median)),
            *(f"{min(values):.3f}", _ratio(values, reference, min)),
            f"{statistics.median(computed[name]):.3f}",
        ]
        table.add_row(name, *cells, *([extra[name]] if extra else []))
    console.print(f"\n{title}", table)


def _ratio(
    values: list[float], reference: list[float], typical: Callable[[list[float]], float]
) -> str:
    return f"{typical(values) / typical(reference):.2f}"


def whole(folder: Path, module: nn.Module, rounds: int) -> dict[str, list[float]]:
    """Seconds to save and to open weights and AdamW's state, against torch.save."""
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def opened() -> None:
        with open_checkpoint(folder / "c.h5"):
            pass

    def torch_saved() -> None:
        torch.save({"w": module.state_dict(), "o": optimizer.state_dict()}, folder / "c.pt")
        fsync(folder / "c.pt")

    ways: dict[str, Callable[[], Any]] = {
        "torch.save": torch_saved,
        "save_checkpoint": lambda: save_checkpoint(
            folder / "c.h5", module.state_dict(), {"optimizer": optimizer.state_dict()}
        ),
        "torch.load": lambda: torch.load(folder / "c.pt", weights_only=True),
        "open_checkpoint": opened,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def rows(rounds: int, layers: int) -> Iterator[Row]:
    """Time saves and loads against safetensors', round by round, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        module = net(layers)
        count = sum(parameter.numel() for parameter in module.parameters())
        tasks = (
            ("save {}", SAVES, False),
            ("load {}, in the system's cache", LOADS, False),
            ("load {}, from the disk", LOADS, True),
        )
        for task, ways, cold in tasks:
            seconds, computed = measure(ways, Path(folder), module, rounds, cold=cold)
            reference = seconds["safetensors"]
            for name, values in seconds.items():
                yield Row(
                    "checkpoint",
                    task.format(f"{count / 1e6:.0f} M parameters"),
                    name,
                    "safetensors",
                    "ms",
                    wall=Spread.of([value * 1e3 for value in values]),
                    cpu=Spread.of([value * 1e3 for value in computed[name]]),
                    ratio=Spread.of([a / b for a, b in zip(values, reference, strict=True)]),
                )


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=14, help="14 are 99 million parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the files go (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        report_peak(given.peak, given.folder, given.layers)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        run(Path(name), given)


def run(folder: Path, given: argparse.Namespace) -> None:
    """Measure, and show the results."""
    console = Console()
    module = net(given.layers)
    count = sum(parameter.numel() for parameter in module.parameters())
    cores = len(os.sched_getaffinity(0))
    console.print(f"{count:,} parameters, {cores} cores, torch {torch.__version__}, {folder}")
    saves = measure(SAVES, folder, module, given.rounds)
    sizes = {name: (folder / file).stat().st_size for name, (file, _) in SAVES.items()}
    loads = measure(LOADS, folder, module, given.rounds)
    cold = measure(LOADS, folder, module, max(3, given.rounds // 2), cold=True)
    peaks = {name: peak_of_load(name, folder, given.layers) for name in LOADS}
    states = whole(folder, module, max(3, given.rounds // 2))
    show(console, "Save (fsync included)", saves, {})
    console.print("bytes:", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    show(console, "Load into a module", loads, {name: f"{mb:.0f}" for name, mb in peaks.items()})
    show(console, "Load into a module, the file not in the cache", cold, {})
    console.print("\nWeights and AdamW's state:")
    for name, values in states.items():
        console.print(f"  {name}: {statistics.median(values):.3f} s")
    if given.json:
        numbers = {
            "saves": saves,
            "loads": loads,
            "cold": cold,
            "peaks_mb": peaks,
            "states": states,
        }
        given.json.write_text(json.dumps({**numbers, "sizes": sizes}, indent=1))


if __name__ == "__main__":
    main()
