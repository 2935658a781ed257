"""Arrays on their way into a file: several threads each fill, check and write a block.

The checksum is of what is written, even where another thread changes an array meanwhile, because a
block is copied first. It stays in the core's cache until it is written: nothing is read back but
what libhdf5 put between the arrays.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from fitkit.checkpoint.digest import BLOCK_BYTES, BlockBuffers, digest_of, sums
from fitkit.checkpoint.file_parts import read_at, start_writing_back, write_at
from fitkit.checkpoint.workers import Workers

# After so many blocks the disk is told to begin, instead of at the end with all of them.
_BLOCKS_TO_WRITE_BACK = 32

#: A place in the file, and what belongs there.
_Piece = tuple[int, np.ndarray[Any, Any]]


class BodyWriter:
    """Writes what follows `start` in a file, and knows the digest of it.

    Args:
        file: open to read and to write, with nothing in its buffer. What isn't added is in it.
        start: where the body begins.
        size_bytes: about how large it gets; a small one is written without threads.
    """

    def __init__(self, file: BinaryIO, start: int, size_bytes: int) -> None:
        self._file = file
        self._block = start  # where the block begins that is being collected
        self._pieces: list[_Piece] = []
        self._ended = 0
        self._buffers = BlockBuffers()
        self._checksums = Workers[bytes](size_bytes)

    def __enter__(self) -> BodyWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._checksums.__exit__(*error)

    def add(self, offset: int, numbers: np.ndarray[Any, Any]) -> None:
        """Put an array's bytes at `offset`, which is behind all that was added before.

        Raises:
            OSError: this or something before it can't be written.
        """
        content: np.ndarray[Any, Any] = numbers.reshape(-1).view(np.uint8)
        while len(content):
            while offset >= self._block + BLOCK_BYTES:
                self._end_block(BLOCK_BYTES)
            fits = self._block + BLOCK_BYTES - offset
            self._pieces.append((offset - self._block, content[:fits]))
            offset, content = offset + fits, content[fits:]

    def finish(self, end: int) -> str:
        """Write the rest of a body that ends at byte `end`; its digest in hexadecimal digits."""
        while self._block < end:
            self._end_block(min(BLOCK_BYTES, end - self._block))
        return digest_of(self._checksums.results())

    def _end_block(self, size_bytes: int) -> None:
        file, block, pieces = self._file, self._block, self._pieces
        self._block, self._pieces = block + BLOCK_BYTES, []
        self._ended += 1
        writes_back = self._ended % _BLOCKS_TO_WRITE_BACK == 0

        def write() -> bytes:
            buffer = self._buffers.own()[:size_bytes]
            _fill(buffer, file, block, pieces)
            if pieces:
                write_at(file, block, buffer)
            if writes_back:
                start_writing_back(file)
            return sums(buffer)

        self._checksums.submit(write)


def _fill(buffer: memoryview, file: BinaryIO, block: int, pieces: list[_Piece]) -> None:
    """Put together what belongs into a block: pieces, and what is in the file between them."""
    position = 0
    for place, content in pieces:
        _read(file, block + position, buffer[position:place])
        position = place + len(content)
        # NumPy lets other threads run meanwhile; assigning to a memoryview doesn't.
        np.copyto(np.frombuffer(buffer[place:position], np.uint8), content)
    _read(file, block + position, buffer[position:])


def _read(file: BinaryIO, offset: int, buffer: memoryview) -> None:
    """Fill memory with what is in the file; zeros stand for what isn't there yet."""
    count = read_at(file, offset, buffer)
    buffer[count:] = bytes(len(buffer) - count)
