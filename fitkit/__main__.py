"""The command line: `python -m fitkit doctor`, `inspect FILE`, `convert SOURCE TARGET`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import fitkit
from fitkit.doctor import report
from fitkit.errors import FitkitError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="fitkit", description="fitkit's command line")
    parser.add_argument("--version", action="version", version=f"fitkit {fitkit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what fitkit sees on this machine")
    inspection = commands.add_parser(
        "inspect", help="print what a checkpoint or weights file holds"
    )
    inspection.add_argument("file", help="a .h5, .safetensors, .pt or .pth file, or a .dcp folder")
    conversion = commands.add_parser(
        "convert", help="write a checkpoint or weights in another file format"
    )
    for name in ("source", "target"):
        conversion.add_argument(
            name, help="a .h5, .safetensors, .pt or .pth file, or a .dcp folder"
        )
    given = parser.parse_args(arguments)
    if given.command == "inspect":
        return inspect(given.file)
    if given.command == "convert":
        return convert(given.source, given.target)
    print(report(fitkit.__version__))
    return 0


def inspect(file: str) -> int:
    """Print what a file holds, or why it can't be read; the exit status."""
    from rich.console import Console

    from fitkit.checkpoint.inspection import print_inspection

    return told(lambda: print_inspection(file, Console()), f"There is no file {file}.")


def convert(source: str, target: str) -> int:
    """Write a file's content in another format, or say why it can't be; the exit status."""
    from fitkit.checkpoint.inspection import convert as write_as

    return told(
        lambda: print(f"Wrote {target} ({write_as(source, target)})."), f"There is no {source}."
    )


def told(act: Callable[[], object], missing: str) -> int:
    """Act, or say in a line why it can't be; the exit status.

    Args:
        missing: what to say where a file isn't there.
    """
    try:
        act()
    except FileNotFoundError:
        print(missing, file=sys.stderr)
        return 1
    except FitkitError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
