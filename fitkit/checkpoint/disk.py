"""Whole checkpoints where they lie: removed, given a second name, asked for."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from fitkit.checkpoint import remote
from fitkit.checkpoint.atomic import (
    flush_folder,
    is_still,
    remove_abandoned,
    replacing,
    unfinished_name,
)
from fitkit.checkpoint.formats import INDEX, folder_format
from fitkit.checkpoint.remote import is_url


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint: a file, or a folder of fitkit's, of which nobody sees a half.

    Raises:
        FileNotFoundError: there is none.
        OSError: it can't be removed, or the folder has other things in it.
    """
    if is_url(path):
        remote.urls.remove(str(path))
        return
    target = Path(path)
    if target.is_symlink() or not (target / INDEX).is_file():
        target.unlink()
        return
    folder_format(path).remove(path)


def link_checkpoint(path: str | os.PathLike[str], twin: str | os.PathLike[str]) -> None:
    """Give a checkpoint a second name, replacing what has it. Bytes are shared if links exist.

    Raises:
        OSError, CheckpointError: the name can't be given; what had it still has it.
    """
    if is_url(path):
        remote.urls.copy(str(path), str(twin))
        return
    if os.path.isdir(path):
        folder_format(path).link(path, twin)
        return
    source, place = os.path.realpath(path), Path(os.path.realpath(twin))
    remove_abandoned(place.parent, place.name, folders=False)
    beside = place.with_name(unfinished_name(place.name))
    is_protected = place.exists() and not os.access(place, os.W_OK)
    with open(source, "rb") as old:
        if fcntl is not None:
            # The new name is the same file's, and isn't taken for abandoned while that is locked.
            with contextlib.suppress(OSError):
                fcntl.flock(old, fcntl.LOCK_SH)
        try:
            os.link(source, beside)
        except OSError:
            has_links = False  # the file system may have none
        else:
            has_links = True
        try:
            if has_links and not is_protected and is_still(beside, old.fileno()):
                os.replace(beside, place)
                flush_folder(place.parent)
            else:
                copy_file(source, twin)
        finally:
            # Still there where both names were one file's already: then nothing is renamed.
            if is_still(beside, old.fileno()):
                beside.unlink(missing_ok=True)


def copy_file(path: str, twin: str | os.PathLike[str]) -> None:
    """Copy a file, whole or not at all."""
    with open(path, "rb") as old, replacing(twin, os.path.getsize(path)) as file:
        shutil.copyfileobj(old, file)


def written_at(path: str | os.PathLike[str]) -> int | None:
    """When a checkpoint was written, in ns, to recognize a later one. None if it doesn't exist."""
    if is_url(path):
        return remote.urls.written_at(str(path))
    index = os.path.join(path, INDEX)
    try:
        return os.stat(index if os.path.isdir(path) else path).st_mtime_ns
    except OSError:
        return None


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, or a folder of fitkit's, at a path or URL."""
    if is_url(path):
        return remote.urls.exists(str(path))
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, INDEX))
