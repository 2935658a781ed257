"""The command line: `python -m fitkit doctor`, `python -m fitkit inspect FILE`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

import fitkit
from fitkit.distributed.cluster import detect
from fitkit.distributed.placement import Machine
from fitkit.distributed.resolve import resolve_strategy
from fitkit.errors import FitkitError

PACKAGES = ("torch", "numpy", "torchmetrics", "h5py", "rich", "cloudpickle")


def doctor() -> str:
    """What fitkit sees on this machine, as text to paste into a bug report."""
    machine = Machine.here()
    cluster = detect()
    strategy = resolve_strategy("auto", "auto", "auto", "32-true", None)
    devices = ", ".join(map(str, strategy.devices))
    lines = {
        "fitkit": fitkit.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "cpu": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
        "cuda": f"{machine.cuda_count} devices (torch was built for {torch.version.cuda})",
        "mps": "yes" if machine.has_mps else "no",
        "launcher": "none"
        if cluster is None
        else f"{cluster.launcher}, rank {cluster.rank} of {cluster.world_size}",
        "devices='auto'": f"{devices}, strategy {strategy.name!r}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="fitkit", description="fitkit's command line")
    parser.add_argument("--version", action="version", version=f"fitkit {fitkit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what fitkit sees on this machine")
    inspection = commands.add_parser(
        "inspect", help="print what a checkpoint or weights file holds"
    )
    inspection.add_argument("file", help="a .h5, .safetensors, .pt or .pth file")
    given = parser.parse_args(arguments)
    if given.command == "inspect":
        return inspect(given.file)
    print(doctor())
    return 0


def inspect(file: str) -> int:
    """Print what a file holds, or why it can't be read; the exit status."""
    from rich.console import Console

    from fitkit.checkpoint.inspection import print_inspection

    try:
        print_inspection(file, Console())
    except FileNotFoundError:
        print(f"There is no file {file}.", file=sys.stderr)
        return 1
    except FitkitError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
