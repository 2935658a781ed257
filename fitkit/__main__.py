"""The command line: `python -m fitkit doctor`, `inspect FILE`, `convert SOURCE TARGET`."""

from __future__ import annotations

import argparse
import sys

import fitkit
from fitkit.doctor import report
from fitkit.errors import FitkitError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="fitkit", description="fitkit's command line")
    parser.add_argument("--version", action="version", version=f"fitkit {fitkit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what fitkit sees on this machine")
    formats = "a .h5, .safetensors, .pt or .pth file, or a .dcp folder"
    inspect = commands.add_parser("inspect", help="print what a checkpoint or weights file holds")
    inspect.add_argument("source", metavar="file", help=formats)
    convert = commands.add_parser(
        "convert", help="write a checkpoint or weights in another file format"
    )
    convert.add_argument("source", help=formats)
    convert.add_argument("target", help=formats)
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        print(report(fitkit.__version__))
        return 0
    from fitkit.checkpoint import inspection

    try:
        if given.command == "inspect":
            from rich.console import Console

            inspection.print_inspection(given.source, Console())
        else:
            written = inspection.convert(given.source, given.target)
            print(f"Wrote {given.target} ({written}).")
    except FileNotFoundError:
        print(f"There is no file {given.source}.", file=sys.stderr)
        return 1
    except FitkitError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
