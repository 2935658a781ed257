"""Files that are written completely or not at all.

A new file is written beside the one that it will replace, forced to the disk, and renamed. A reader
of the path finds the old content or the new one, even after a kill or a power cut. Of six ways to
replace an HDF5 file, tried with 60 kills each, the others lost both or mixed them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from fitkit.checkpoint import remote
from fitkit.checkpoint.remote import is_url
from fitkit.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows, where nothing tells a living writer's file from a dead one's
    fcntl = None  # type: ignore[assignment]


#: How the names of unfinished files end; a killed process leaves one behind.
UNFINISHED_SUFFIX = ".fitkit-unfinished"

# At most 160 bytes of UTF-8, so that the name of an unfinished file stays below 255 bytes.
NAME_CHARACTERS = 40
UNFINISHED = re.compile(rf"\.(.+)\.[0-9a-f]{{12}}{re.escape(UNFINISHED_SUFFIX)}", re.DOTALL)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], size_bytes: int = 0) -> Iterator[BinaryIO]:
    """Give a new file to write, which takes the place of `path` when the block ends without error.

    Until then `path` is untouched, and after any error nothing of the new file is left. A
    symbolic link is kept; the file that it points to is replaced. An existing file's permissions
    are kept; a new one gets the process's default ones. What killed processes left unfinished for
    this path is removed first.

    Other users with access to the folder can replace the unfinished file, for example by a link.
    So it is only ever reached by its descriptor, and gets its name if it is still the same.

    Args:
        path: the file to create or to replace, or its URL (`extras/urls.py`).
        size_bytes: about how much will be written, for the message when the disk is full.

    Raises:
        CheckpointError: the file can't be written; the message says what to do.
    """
    if is_url(path):
        with remote.urls.uploading(os.fspath(path)) as file:
            yield file
        return
    target = _target_of(path)
    with refused_writes(path, target.parent, size_bytes):
        check_folder_of(path, target)
        with _opened_folder(target.parent) as folder:
            existing = _check_target(path, target, folder)
            remove_abandoned(target.parent, target.name, folders=False)
            final = _name_in(folder, target)
            temporary = _name_in(folder, target.with_name(unfinished_name(target.name)))
            with _create(temporary, folder, existing) as file:
                yield file
                _finish(file, existing)
                if fcntl is not None:
                    # Before it is closed: closing gives up the lock that says it isn't abandoned.
                    if not is_still(temporary, file.fileno(), folder):
                        raise CheckpointError(
                            f"{os.fspath(path)} can't be written: somebody has removed or replaced "
                            f"the unfinished file {temporary} meanwhile. Nothing was changed. "
                            "Choose a folder that nobody else may write to."
                        )
                    os.replace(temporary, final, src_dir_fd=folder, dst_dir_fd=folder)
            if fcntl is None:  # Windows renames no open file
                os.replace(temporary, final)
    flush_folder(target.parent)


def check_folder_of(path: str | os.PathLike[str], target: Path) -> None:
    """Refuse a path whose folder is missing."""
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{os.fspath(path)} can't be written: there is no folder {target.parent}. "
            f"Create it first: os.makedirs({str(target.parent)!r}, exist_ok=True).",
            code="FK059",
        )


def _target_of(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path means, where its links lead."""
    given = Path(os.path.abspath(path))
    if UNFINISHED.fullmatch(given.parent.name):
        # We made this folder (folders.py): a link in its place, or in it, is somebody else's.
        return Path(os.path.realpath(given.parent.parent), given.parent.name, given.name)
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _opened_folder(folder: Path) -> Iterator[int | None]:
    """Give a descriptor for what happens in a folder, even if its path leads elsewhere meanwhile.

    None on Windows, which has no such calls.
    """
    if fcntl is None:
        yield None
        return
    # O_PATH, where there is one: it needs no right to list the folder.
    access = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(folder, access)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_target(
    path: str | os.PathLike[str], target: Path, folder: int | None
) -> os.stat_result | None:
    """Return what stands at `target` (None: nothing), where a file may be put there."""
    try:
        # Not through a link: all that the path had are resolved.
        existing = os.stat(_name_in(folder, target), dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(existing.st_mode):
        # Renaming over a device such as /dev/null would replace it for the whole machine.
        kind = "a folder" if stat.S_ISDIR(existing.st_mode) else "not an ordinary file"
        raise CheckpointError(
            f"{os.fspath(path)} can't be written: it is {kind}. Give the path of a file."
        )
    if not os.access(target, os.W_OK):
        # Renaming needs the folder's permission only, and would overwrite what is protected.
        raise CheckpointError(
            f"{os.fspath(path)} can't be written: it is read-only. "
            "Choose another path, or make it writable first."
        )
    return existing


def _name_in(folder: int | None, path: Path) -> str:
    """Return what a file is called in calls with `dir_fd=folder`."""
    return str(path) if folder is None else path.name


def unfinished_name(name: str) -> str:
    """Return a name for what isn't `name` yet; `remove_abandoned` knows it."""
    return f".{name[:NAME_CHARACTERS]}.{secrets.token_hex(6)}{UNFINISHED_SUFFIX}"


def remove_abandoned(
    folder: str | os.PathLike[str], name: str = "", *, folders: bool = True
) -> None:
    """Remove the unfinished files and folders in a folder that no living process writes.

    A process holds a lock on the one that it writes, until it dies at the latest. Where
    there are no such locks, on Windows and at URLs, nothing is removed; nor is an error raised.

    Args:
        folder: where to look; not below it.
        name: only what is unfinished for this name is removed. Default: all.
        folders: whether unfinished folders are removed, too.
    """
    if fcntl is None or is_url(folder):
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = UNFINISHED.fullmatch(entry.name)
            if (
                found
                and name[:NAME_CHARACTERS] in ("", found[1])
                and (entry.is_file(follow_symlinks=False) or (folders and entry.is_dir()))
            ):
                _remove_unless_locked(entry.path)


def _remove_unless_locked(path: str) -> None:
    # Without the right to write or to lock, it may be another's, and stays.
    with contextlib.suppress(OSError):
        is_folder = os.path.isdir(path)
        access = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_NONBLOCK
        descriptor = os.open(path, access | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still(path, descriptor):
                remove_tree(path) if is_folder else os.unlink(path)
        finally:
            os.close(descriptor)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a folder as far as it can be; a link is left alone."""
    shutil.rmtree(path, ignore_errors=True)


def is_still(path: str | os.PathLike[str], descriptor: int, folder: int | None = None) -> bool:
    """Whether a path, which isn't followed, is what an open descriptor was opened for."""
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


@contextlib.contextmanager
def _create(
    temporary: str, folder: int | None, existing: os.stat_result | None
) -> Iterator[BinaryIO]:
    # O_EXCL: never a file that someone else made, nor through a link. 0o666 lets the kernel apply
    # the umask, which a process can't ask for without changing it under its other threads.
    # Beside an existing file, which may be private, nobody else reads it before it is finished.
    mode = 0o666 if existing is None else 0o600
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    file = os.fdopen(_locked(temporary, folder, flags, mode), "w+b")
    try:
        yield file
    except BaseException:
        if fcntl is not None and is_still(temporary, file.fileno(), folder):
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
        # What is still buffered can't always be written (a full disk): that isn't the error.
        with contextlib.suppress(OSError):
            file.close()
        if fcntl is None:  # Windows removes no open file
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
    file.close()


def _locked(temporary: str, folder: int | None, flags: int, mode: int) -> int:
    """Return a new file, locked; its descriptor."""
    while True:
        descriptor = os.open(temporary, flags, mode, dir_fd=folder)
        if fcntl is None:
            return descriptor
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another saver may have taken it for abandoned before it was locked.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _finish(file: BinaryIO, existing: os.stat_result | None) -> None:
    # By the descriptor: a path may be somebody else's link by now. Windows has neither call.
    if existing is not None and hasattr(os, "fchown"):
        with contextlib.suppress(OSError):  # only a privileged process can give files away
            os.fchown(file.fileno(), existing.st_uid, existing.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(existing.st_mode))
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: str | os.PathLike[str]) -> None:
    # The rename itself reaches the disk with its folder. Some systems (Windows, some network
    # file systems) can't, and the file is already in place: no reason to call the save failed.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def refused_writes(
    path: str | os.PathLike[str], folder: Path, size_bytes: int = 0
) -> Iterator[None]:
    """Turn what the system refuses to write into a folder into an error that says what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{os.fspath(path)} can't be written: {_reason(error, folder, size_bytes)} "
            "Nothing was changed."
        ) from error


def _reason(error: OSError, folder: Path, size_bytes: int) -> str:
    needed = f"{size_bytes / 1e6:.1f} MB are needed, " if size_bytes else ""
    if error.errno == errno.EFBIG:
        return f"{needed}more than the system or `ulimit -f` allows one file to have."
    if error.errno in _FULL:
        free = shutil.disk_usage(folder).free / 1e6
        return (
            f"the disk is full or a quota is reached ({needed}{free:.1f} MB are free in "
            f"{folder}). Make room or choose another folder."
        )
    if error.errno in _FORBIDDEN:
        return f"the folder {folder} can't be written to. Choose another, or change its rights."
    return f"{error.strerror or error}. Choose another path."


class HeldInterrupts:
    """SIGINT and SIGTERM wait while the block runs; `deliver` lets what has arrived through.

    Only handlers written in Python wait: others (the default SIGTERM) end the process at once.
    Outside the main thread nothing needs to wait, because Python runs handlers in that thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def deliver(self) -> None:
        """Run the handlers of what has arrived; may raise what they raise."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)
