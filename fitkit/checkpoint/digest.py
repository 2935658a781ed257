"""The digest of a file's body: of each block sums of its words, and of these the SHA-256.

Each word is in one sum of either set, and no two words are in the same sums of both;
`docs/checkpoint-format.md` says what that can't miss. NumPy adds up a block in a third of the time
that zlib takes for its CRC-32, so that a load takes hardly longer than without. Blocks can be
checked on several cores, and while they are written (`body_writer.py`).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from fitkit.checkpoint.file_parts import read_at
from fitkit.checkpoint.workers import Workers

#: What one checksum covers; part of the format. Smaller blocks cost more calls than they save.
BLOCK_BYTES = 1 << 20

# A thread checks as many blocks in one go: handing them over costs as much as some 100 KB.
_BLOCKS_AT_ONCE = 8

#: What stands for a block in the list that is hashed.
Checksum = Callable[[memoryview], bytes]

# How many sums each set has. Parts of the format: the words of 4 KiB, and the nearest prime below.
# Two words of a block are never in the same sums of both: their product is larger than a block.
_WIDTHS = (512, 509)


def sums(block: memoryview) -> bytes:
    """The checksum of version 3: the SHA-256 of the sums of the block's words."""
    odd = len(block) % 8
    words = np.frombuffer(bytes(block) + bytes(8 - odd) if odd else block, "<u8")
    return hashlib.sha256(b"".join(_folded(words, width) for width in _WIDTHS)).digest()


def _folded(words: np.ndarray[Any, Any], width: int) -> bytes:
    """The sums, modulo 2 to the 64, of the words whose numbers leave the same rest by `width`."""
    whole = len(words) // width * width
    found = np.add.reduce(words[:whole].reshape(-1, width), axis=0)
    found[: len(words) - whole] += words[whole:]
    return found.astype("<u8", copy=False).tobytes()


def sha256(block: memoryview) -> bytes:
    """The checksum of version 2: SHA-256 in hexadecimal digits."""
    return hashlib.sha256(block).hexdigest().encode("ascii")


def digest_of(checksums: list[bytes]) -> str:
    """The digest of all blocks, in hexadecimal digits: their number and order count, too."""
    return hashlib.sha256(b"".join(checksums)).hexdigest()


def blocks_digest(file: BinaryIO, start: int, end: int, checksum: Checksum = sums) -> str:
    """The digest of the bytes from `start` to `end`, in blocks.

    The file is read through the system, and not through its buffer.
    """
    buffers = BlockBuffers()

    def checksums(first: int, last: int) -> bytes:
        buffer = buffers.own()
        found = []
        for offset in range(first, last, BLOCK_BYTES):
            count = read_at(file, offset, buffer[: min(BLOCK_BYTES, last - offset)])
            found.append(checksum(buffer[:count]))
        return b"".join(found)

    with Workers[bytes](end - start) as workers:
        step = _BLOCKS_AT_ONCE * BLOCK_BYTES
        for first in range(start, end, step):
            workers.submit(functools.partial(checksums, first, min(first + step, end)))
        return digest_of(workers.results())


class BlockBuffers:
    """Room for one block in each thread that asks."""

    def __init__(self) -> None:
        self._local = threading.local()

    def own(self) -> memoryview:
        """This thread's."""
        buffer: memoryview | None = getattr(self._local, "block", None)
        if buffer is None:
            buffer = self._local.block = memoryview(bytearray(BLOCK_BYTES))
        return buffer


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
