"""Parts of an open file at known places, read and written by several threads at once."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

# Without preadv and pwrite (Windows), reading at a place means moving the file's one position.
_POSITION = threading.Lock()
# Linux, <linux/fs.h>.
_SYNC_FILE_RANGE_WRITE = 2


def read_at(file: BinaryIO, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` with the file's bytes from `offset` on; how many there were.

    Several threads may read one file, unless another reads it in the ordinary way.
    """
    done = 0
    while done < len(buffer):
        count = _read_once(file, offset + done, buffer[done:])
        if count == 0:
            break
        done += count
    return done


def _read_once(file: BinaryIO, offset: int, buffer: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [buffer], offset)
    with _POSITION:
        file.seek(offset)
        count: int = file.readinto(buffer)  # type: ignore[attr-defined]
        return count


def write_at(file: BinaryIO, offset: int, content: memoryview) -> None:
    """Write bytes at a place, past the file's buffer; several threads may."""
    if not hasattr(os, "pwrite"):
        with _POSITION:
            file.seek(offset)
            file.write(content)
            file.flush()
        return
    while content:
        count = os.pwrite(file.fileno(), content, offset)
        content, offset = content[count:], offset + count


def start_writing_back(file: BinaryIO) -> None:
    """Let the disk begin with what was written so far, so that less is left for `fsync`.

    Without effect where the system has no such call. An error of the disk is left for `fsync`.
    """
    start = _sync_file_range()
    if start is not None:
        start(file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[..., Any] | None:
    # fdatasync would do too, but hides an error of the disk from the fsync at the end.
    try:
        found: Callable[..., Any] = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    return found


def state_of(file: BinaryIO) -> tuple[int, int]:
    """What differs after somebody has written to the file: its size, when it was written to."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns
