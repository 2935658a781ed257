"""The command line: `python -m fitkit doctor`, `explain`, `guide`, `inspect`, `convert`, `diff`,
`verify`."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    from fitkit.extras.commands import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
