"""The digest of a file's body: SHA-256 by blocks, on several cores.

One core hashes 1.7 GB/s where it has instructions for it, four times less than it can copy. The
blocks of a file can be hashed at the same time, and while they are written (`body_writer.py`).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

#: What one hash covers; part of the format. Smaller blocks cost more calls than they save.
BLOCK_BYTES = 1 << 20

# Memory, not cores, is what limits more threads than these.
_MOST_THREADS = 8
# Below this size starting threads costs more than it saves.
_WORTH_THREADS_BYTES = 8 * BLOCK_BYTES
# Blocks that a thread has waiting: enough never to be idle, few enough to hold little memory.
_WAITING = 2

# Without preadv (Windows), reading at a place means moving the file's one position.
_POSITION = threading.Lock()


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


class BlockHashes:
    """The hashes of a body's blocks, made by several threads, and the digest of them all.

    Args:
        size_bytes: about how large the body is; a small one is hashed without threads.
    """

    def __init__(self, size_bytes: int) -> None:
        self._hashes: list[bytes | Future[bytes]] = []
        self._waiting: deque[Future[bytes]] = deque()
        self._buffers = threading.local()
        self._threads = min(_cores(), _MOST_THREADS)
        large = size_bytes >= _WORTH_THREADS_BYTES and self._threads > 1
        self._pool = ThreadPoolExecutor(self._threads, "fitkit-digest") if large else None

    def __enter__(self) -> BlockHashes:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, fill: Callable[[memoryview], int]) -> None:
        """Hash the next block.

        Args:
            fill: puts the block's bytes into the memory that it is given, does with them what
                else is to be done, and returns how many there are. Called in any thread.

        Raises:
            Exception: what `fill` raised for this block or for one before.
        """
        if self._pool is not None:
            try:
                future = self._pool.submit(self._hash, fill)
            except RuntimeError:  # no thread can be started, as while the interpreter ends
                self._pool = None
            else:
                self._hashes.append(future)
                self._waiting.append(future)
                if len(self._waiting) > _WAITING * self._threads:
                    self._waiting.popleft().result()
                return
        self._hashes.append(self._hash(fill))

    def digest(self) -> str:
        """The digest, in hexadecimal digits, when all blocks are there."""
        whole = hashlib.sha256()
        for block in self._hashes:
            digest = block if isinstance(block, bytes) else block.result()
            whole.update(digest.hex().encode("ascii"))
        return whole.hexdigest()

    def _hash(self, fill: Callable[[memoryview], int]) -> bytes:
        buffer = getattr(self._buffers, "block", None)
        if buffer is None:
            buffer = self._buffers.block = memoryview(bytearray(BLOCK_BYTES))
        return hashlib.sha256(buffer[: fill(buffer)]).digest()


def blocks_digest(file: BinaryIO, start: int, end: int) -> str:
    """The digest of the bytes from `start` to `end`, in blocks: that of version 2.

    The file is read through the system, and not through its buffer.
    """
    with BlockHashes(end - start) as hashes:
        for offset in range(start, end, BLOCK_BYTES):
            hashes.add(_reading(file, offset, min(BLOCK_BYTES, end - offset)))
        return hashes.digest()


def _reading(file: BinaryIO, offset: int, size_bytes: int) -> Callable[[memoryview], int]:
    return lambda buffer: read_at(file, offset, buffer[:size_bytes])


def plain_digest(file: BinaryIO, start: int) -> str:
    """The SHA-256 of all from byte `start` on, in one piece: the digest of version 1."""
    digest = hashlib.sha256()
    for block in _blocks(file, start):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: BinaryIO, start: int) -> Iterator[memoryview]:
    block = memoryview(bytearray(BLOCK_BYTES))
    while count := read_at(file, start, block):
        yield block[:count]
        start += count


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
