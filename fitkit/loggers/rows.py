"""Files of rows that a resumed training goes on with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fitkit.arguments import describe
from fitkit.callbacks.epoch_files import is_before, replace_text, whole_lines
from fitkit.checkpoint.atomic import remove_abandoned
from fitkit.errors import ArgumentTypeError


def checked_path(path: object, name: str = "path") -> Path:
    """A path as an object.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(path, (str, os.PathLike)) and str(path):
        return Path(path)
    raise ArgumentTypeError(f"{name}={describe(path)} must be a path.")


def begin_file(path: Path, *, keeps: bool) -> None:
    """Make a file that can be written: empty, or as it is but for a line that was cut short."""
    remove_abandoned(path.parent, path.name, folders=False)
    with path.open("a" if keeps else "w", encoding="utf-8"):
        pass
    if keeps:
        whole_lines(path)


def without_later_rows(path: Path, step: int, step_in: Callable[[str], object]) -> None:
    """Drop a file's lines whose step comes after `step`: they will be made again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if is_before(step_in(line), step + 1)]
    if len(kept) < len(lines):
        replace_text(path, "".join(kept))
