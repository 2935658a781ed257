"""Folders that are there whole or not at all, as `atomic.py` has it for files.

A folder is filled beside the one that it will replace, and gets its name at the end. Linux can
exchange two names in one step; elsewhere the old folder is moved aside first, and whoever looks
between the two steps finds none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from fitkit.checkpoint.atomic import (
    NAME_CHARACTERS,
    UNFINISHED,
    flush_folder,
    remove_abandoned,
    replacing,
    unfinished_name,
)
from fitkit.errors import CheckpointError

INDEX = "index.h5"
"""The file by which a folder of ours is known, written last."""

SHARD = re.compile(r"shard-[0-9]{5,}-model-00001-of-00001\.safetensors")
"""What the other files of such a folder are called."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class UnfinishedFolder:
    """A new folder to fill, which takes the place of `path` at `finish`.

    What killed processes left unfinished for this path is removed first: whoever fills a folder
    holds a lock on it, which the system takes from a process that dies.

    Args:
        path: the folder to make; one that is there is replaced where it is a checkpoint of ours,
            or empty.

    Attributes:
        place: where to write meanwhile.

    Raises:
        CheckpointError: there can't be a folder at `path`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._target = Path(os.path.realpath(path))
        try:
            _check_target(self._path, self._target)
            _remove_abandoned(self._target.parent, self._target.name)
            self.place, self._lock = _make_locked(self._target)
        except CheckpointError:
            raise
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Give the folder its name.

        Raises:
            CheckpointError: it can't have it; what was there still is.
        """
        try:
            _flush(self.place)
            if self._target.exists():
                _replace(self.place, self._target)
            else:
                os.rename(self.place, self._target)
            _flush(self._target.parent)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what lies at the place: after a failure the new folder, else the old one."""
        shutil.rmtree(self.place, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path} can't be written: {error.strerror or error}. Nothing was changed; "
            "choose another path."
        )


def _check_target(path: str, target: Path) -> None:
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{path} can't be written: there is no folder {target.parent}. Create it first: "
            f"os.makedirs({str(target.parent)!r}, exist_ok=True)."
        )
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
    """What lies in a folder beside a checkpoint's files, and what systems leave (`.DS_Store`)."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return [name for name in names if name != INDEX and not SHARD.fullmatch(name)]


def _make_locked(target: Path) -> tuple[Path, int | None]:
    """A new folder beside `target`, and the descriptor that holds its lock."""
    while True:
        place = target.with_name(unfinished_name(target.name))
        place.mkdir()
        if fcntl is None:
            return place, None
        descriptor = None
        # Another saver may take it for abandoned before it is locked.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(place, os.O_RDONLY)
        if descriptor is not None:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if place.exists():
                return place, descriptor
            os.close(descriptor)


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


def _flush(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems can't, and it is no reason to fail
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(parent: Path, name: str) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            found = UNFINISHED.fullmatch(entry.name)
            if found and found[1] == name[:NAME_CHARACTERS] and entry.is_dir():
                _remove_unless_locked(entry.path)


def _remove_unless_locked(path: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint: a file, or a folder of ours, of which no half is ever seen.

    Raises:
        FileNotFoundError: there is none.
        OSError: it can't be removed, or the folder has other things in it.
    """
    target = Path(path)
    if target.is_symlink() or not (target / INDEX).is_file():
        target.unlink()
        return
    others = _others_in(target)
    if others:
        raise OSError(errno.ENOTEMPTY, f"it has other things in it ({others[0]})")
    aside = target.with_name(unfinished_name(target.name))
    os.rename(target, aside)
    shutil.rmtree(aside)


def link_checkpoint(path: str | os.PathLike[str], twin: str | os.PathLike[str]) -> None:
    """Give a checkpoint a second name, replacing what has it; its bytes stay one where links are.

    Raises:
        OSError, CheckpointError: the name can't be given; what had it still has it.
    """
    if os.path.isdir(path):
        folder = UnfinishedFolder(twin)
        try:
            for entry in os.scandir(path):
                _link_file(entry.path, str(folder.place / entry.name))
        except BaseException:
            folder.discard()
            raise
        folder.finish()
        return
    source, place = os.path.realpath(path), Path(os.path.realpath(twin))
    remove_abandoned(place.parent, place.name)
    beside = place.with_name(unfinished_name(place.name))
    is_protected = place.exists() and not os.access(place, os.W_OK)
    try:
        os.link(source, beside)
    except OSError:
        has_links = False  # the file system may have none
    else:
        has_links = True
    try:
        if has_links and not is_protected:
            os.replace(beside, place)
            flush_folder(place.parent)
        else:
            with open(source, "rb") as old, replacing(twin, os.path.getsize(source)) as file:
                shutil.copyfileobj(old, file)
    finally:
        # Still there where both names were one file's already: then nothing is renamed.
        beside.unlink(missing_ok=True)


def _link_file(path: str, twin: str) -> None:
    try:
        os.link(path, twin)
    except OSError:  # a file system without links
        shutil.copy2(path, twin)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, or a folder of ours, at a path."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, INDEX))
