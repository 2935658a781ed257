"""Folders that are written completely or not at all, as `atomic.py` does for files.

A folder is filled beside the one that it will replace, and gets its name at the end. Linux can
exchange two names in one step. Elsewhere the old folder is moved aside first, and a reader between
the two steps finds none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from fitkit.errors import CheckpointError
from fitkit.seams.checkpoints import (
    INDEX,
    copy_file,
    flush_folder,
    is_still,
    refused_writes,
    remove_tree,
    unfinished_name,
)
from fitkit.seams.files import check_folder_of, remove_abandoned

SHARD = re.compile(r"shard-[0-9]{5,}-model-00001-of-00001\.safetensors")
"""The names of the other files in such a folder."""

REMOVAL_S = 1.0
"""How long a folder is removed again, if files come into it meanwhile."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class UnfinishedFolder:
    """A new folder to fill. It replaces `path` at `finish`.

    Unfinished folders that killed processes left for this path are removed first. A process holds a
    lock on the folder that it fills, and the system releases it when the process dies.

    Args:
        path: the folder to make. An existing one is replaced if it is empty or fitkit's checkpoint.

    Attributes:
        place: where to write until then.

    Raises:
        CheckpointError: there can't be a folder at `path`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._target = Path(os.path.realpath(path))
        self._ended = False
        with refused_writes(path, self._target.parent):
            _check_target(self._path, self._target)
            remove_abandoned(self._target.parent, self._target.name)
            self.place: Path
            self.place, self._lock = _make_locked(self._target)

    def link(self, path: str) -> None:
        """Give a file a second name in the folder."""
        name = os.path.basename(path)
        try:
            if self._lock is None:
                os.link(path, self.place / name)
            else:
                os.link(path, name, dst_dir_fd=self._lock)
        except OSError:  # a file system without links
            copy_file(path, self.place / name)

    def finish(self) -> None:
        """Give the folder its name.

        Raises:
            CheckpointError: it can't have it; what was there still is.
        """
        try:
            with refused_writes(self._path, self._target.parent):
                flush_folder(self.place)
                if self._lock is not None and not is_still(self.place, self._lock):
                    raise CheckpointError(
                        f"{self._path} can't be written: somebody has moved or replaced the "
                        f"unfinished folder {self.place} meanwhile. Choose a folder that nobody "
                        "else may write to."
                    )
                # What is there may be another than when this folder was begun.
                _check_target(self._path, self._target)
                if self._target.exists():
                    with _held(self._target) as old:
                        _replace(self.place, self._target)
                        _remove(self.place, old)
                else:
                    os.rename(self.place, self._target)
                flush_folder(self._target.parent)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the new folder, where it hasn't got its name."""
        if self._ended:
            return
        self._ended = True
        _remove(self.place, self._lock)
        if self._lock is not None:
            os.close(self._lock)


def _check_target(path: str, target: Path) -> None:
    check_folder_of(path, target)
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"{path} can't be written: it is a file. Give another path.")
    others = _others_in(target)
    if others:
        raise CheckpointError(
            f"{path} can't be written: it is a folder with other things in it ({others[0]}), which "
            "would be lost. Give another path, or move them elsewhere."
        )


def _others_in(folder: Path) -> list[str]:
    """Return what lies in a folder beside a checkpoint's files, and what systems leave
    (`.DS_Store`).
    """
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return [name for name in names if name != INDEX and not SHARD.fullmatch(name)]


def _make_locked(target: Path) -> tuple[Path, int | None]:
    """Return a new folder beside `target`, and the descriptor that holds its lock."""
    while True:
        place = target.with_name(unfinished_name(target.name))
        place.mkdir()
        descriptor = None
        # Another saver may take it for abandoned before it is locked.
        with contextlib.suppress(FileNotFoundError):
            descriptor = _lock(place)
        if fcntl is None:
            return place, None
        if descriptor is not None:
            if is_still(place, descriptor):
                return place, descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds a folder's lock; None on Windows."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[int | None]:
    """Lock a folder, so that under another name it isn't taken for abandoned."""
    descriptor = _lock(folder)
    while descriptor is not None and not is_still(folder, descriptor):
        os.close(descriptor)  # another saver has replaced it meanwhile
        descriptor = _lock(folder)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _remove(path: Path, descriptor: int | None) -> None:
    """Remove a folder, where it is still the one that was opened."""
    ends_at = time.monotonic() + REMOVAL_S
    while descriptor is None or is_still(path, descriptor):
        remove_tree(path)
        # Another rank's thread may just begin a file in it.
        if not path.exists() or time.monotonic() > ends_at:
            return
        time.sleep(0.01)


def _replace(new: Path, old: Path) -> None:
    """Let `new` have the name of `old`, and the other way round."""
    if _exchange(new, old):
        return
    aside = old.with_name(unfinished_name(old.name))
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system can't."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    status: int = rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    return status == 0


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a folder of fitkit's, of which nobody sees a half.

    Raises:
        OSError: it can't be removed, or it has other things in it.
    """
    target = Path(path)
    others = _others_in(target)
    if others:
        raise OSError(errno.ENOTEMPTY, f"it has other things in it ({others[0]})")
    aside = target.with_name(unfinished_name(target.name))
    with _held(target) as descriptor:
        os.rename(target, aside)
        if descriptor is None or is_still(aside, descriptor):
            shutil.rmtree(aside)


def link(path: str | os.PathLike[str], twin: str | os.PathLike[str]) -> None:
    """Give a folder a second name, replacing what has it. Bytes are shared if links exist.

    Raises:
        OSError, CheckpointError: the name can't be given; what had it still has it.
    """
    folder = UnfinishedFolder(twin)
    try:
        for entry in os.scandir(path):
            folder.link(entry.path)
    except BaseException:
        folder.discard()
        raise
    folder.finish()
