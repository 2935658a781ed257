"""Arrays on their way into a file: several threads each fill, hash and write a block.

What is hashed is what is written, even where another thread changes an array meanwhile, because a
block is copied first. It stays in the core's cache until it is written: nothing is read back but
what libhdf5 put between the arrays.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from fitkit.checkpoint.digest import BLOCK_BYTES, BlockHashes, read_at, write_at

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
        self._hashes = BlockHashes(size_bytes)

    def __enter__(self) -> BodyWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._hashes.__exit__(*error)

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
        return self._hashes.digest()

    def _end_block(self, size_bytes: int) -> None:
        file, block, pieces = self._file, self._block, self._pieces
        self._block, self._pieces = block + BLOCK_BYTES, []

        def fill(buffer: memoryview) -> int:
            position = 0
            for place, content in pieces:
                _read(file, block + position, buffer[position:place])
                position = place + len(content)
                # NumPy lets other threads run meanwhile; assigning to a memoryview doesn't.
                np.copyto(np.frombuffer(buffer[place:position], np.uint8), content)
            _read(file, block + position, buffer[position:size_bytes])
            if pieces:
                write_at(file, block, buffer[:size_bytes])
            return size_bytes

        self._hashes.add(fill)


def _read(file: BinaryIO, offset: int, buffer: memoryview) -> None:
    """Fill memory with what is in the file; zeros stand for what isn't there yet."""
    count = read_at(file, offset, buffer)
    buffer[count:] = bytes(len(buffer) - count)
