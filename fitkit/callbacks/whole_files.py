"""The newest of several checkpoints that isn't damaged, and the end of those not wanted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from fitkit.checkpoint import open_checkpoint, remove_checkpoint
from fitkit.checkpoint.folders import INDEX
from fitkit.errors import CheckpointError, warn


def remove_unwanted(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, where it is there; a warning where it can't be."""
    try:
        with contextlib.suppress(FileNotFoundError):
            remove_checkpoint(path)
    except OSError as error:
        reason = error.strerror or error
        warn(f"{os.fspath(path)} is no longer wanted, but can't be deleted: {reason}.")


def written_at(path: str | os.PathLike[str]) -> int | None:
    """When a checkpoint was written, in ns, which tells it from a later one; None: not there."""
    index = os.path.join(path, INDEX)
    try:
        return os.stat(index if os.path.isdir(path) else path).st_mtime_ns
    except OSError:
        return None


def newest_whole(paths: Iterable[str], refused: list[str] | None = None) -> str | None:
    """The first of `paths` that can be gone on from, with a warning for each before it; None: none.

    Args:
        paths: checkpoints, the newest first.
        refused: gets those that can't be used.

    Raises:
        CheckpointError: there are some, and none can be used.
    """
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            with open_checkpoint(path):
                pass
        except FileNotFoundError:  # another process has deleted it
            continue
        except CheckpointError as error:
            errors.append(error)
            if refused is not None:
                refused.append(path)
            continue
        for problem in errors:
            warn(f"{problem} The training goes on from {path}, which is older.")
        return path
    if len(errors) > 1:
        raise CheckpointError(f"None of {len(errors)} checkpoints can be used. {errors[0]}")
    if errors:
        raise errors[0]
    return None
