"""The command line: `python -m fitkit doctor`, `explain`, `guide`, `inspect`, `convert`, `diff`,
`verify`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

import fitkit
from fitkit.errors import FitkitError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="fitkit", description="fitkit's command line")
    parser.add_argument("--version", action="version", version=f"fitkit {fitkit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what fitkit sees on this machine")
    commands.add_parser("guide", help="print a short guide, made for coding agents")
    explain = commands.add_parser("explain", help="print what a message's code means")
    explain.add_argument(
        "code", nargs="?", help="such as FK002, at the end of a message; without it: all codes"
    )
    formats = "a .h5, .safetensors, .pt or .pth file, or a .dcp folder"
    inspect = commands.add_parser("inspect", help="print what a checkpoint or weights file holds")
    inspect.add_argument("source", metavar="file", help=formats)
    convert = commands.add_parser(
        "convert", help="write a checkpoint or weights in another file format"
    )
    convert.add_argument("source", help=formats)
    convert.add_argument("target", help=formats)
    diff = commands.add_parser("diff", help="print in what two runs' files differ")
    diff.add_argument("source", metavar="one", help=f"the folder of a RunFolder, {formats}")
    diff.add_argument("other", help="as one")
    verify = commands.add_parser(
        "verify", help="run a script up to its first fit, and verify that model with those data"
    )
    verify.add_argument("--devices", type=int, default=2, help="processes (default 2)")
    verify.add_argument("--updates", type=int, default=3, help="updates of each run (default 3)")
    verify.add_argument("--jit-compile", action="store_true", help="run torch.compile, too")
    verify.add_argument(
        "--against", choices=["cpu"], help="compare the device with the CPU, too, by module"
    )
    verify.add_argument("source", metavar="script", help="a Python script that calls fit")
    verify.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own arguments"
    )
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        from fitkit.extras.doctor import report

        print(report(fitkit.__version__))
        return 0
    if given.command == "guide":
        print(Path(fitkit.__file__).with_name("guide.md").read_text(encoding="utf-8"), end="")
        return 0
    if given.command == "explain":
        return _explain(given.code)
    if given.command == "verify":
        return _verify(given)
    from rich.console import Console

    from fitkit.extras import comparison, inspection

    try:
        if given.command == "inspect":
            inspection.print_inspection(given.source, Console())
        elif given.command == "diff":
            comparison.print_comparison(given.source, given.other, Console())
        else:
            written = inspection.convert(given.source, given.target)
            print(f"Wrote {given.target} ({written}).")
    except FileNotFoundError:
        files = [given.source, getattr(given, "other", given.source)]
        name = next((file for file in files if not os.path.exists(file)), given.source)
        print(f"There is no file {name}.", file=sys.stderr)
        return 1
    except FitkitError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def _explain(code: str | None) -> int:
    """Print what a code means, or all codes; 1 where there is no such code."""
    from fitkit.extras.code_texts import all_codes, code_text

    try:
        print(all_codes() if code is None else code_text(code))
    except FitkitError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _verify(given: argparse.Namespace) -> int:
    """Verify a script; 0 where all that was run is equal, 1 where not, 2 where it can't be told."""
    from fitkit.extras.verification.verifying import verify_script

    if not os.path.isfile(given.source):
        print(f"There is no file {given.source}.", file=sys.stderr)
        return 2
    try:
        found = verify_script(
            given.source,
            given.arguments,
            devices=given.devices,
            updates=given.updates,
            jit_compile=given.jit_compile or None,
            against=given.against,
        )
    except FitkitError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    except Exception:  # the script's own
        traceback.print_exc()
        return 2
    return 0 if found.ok else 1
