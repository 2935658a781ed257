"""The numbers of arrays at known places in a checked file: copied out, or used where they lie."""

from __future__ import annotations

import math
import mmap
from typing import Any, BinaryIO

import numpy as np
import torch

from fitkit.checkpoint.digest import read_at
from fitkit.checkpoint.dtypes import empty_stored, file_dtype, from_stored, stored_shape

# Mapping less than this isn't worth it.
_WORTH_MAPPING_BYTES = 1024


def bytes_of(numbers: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array in one piece, without a copy."""
    content: Any = numbers.reshape(-1).view(np.uint8)
    return memoryview(content)


class StoredArrays:
    """Arrays in an open file, each said by its place, shape and dtype, which were checked.

    Every method raises ValueError where the bytes aren't what they have to be, and OSError where
    they can't be read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._mapping: mmap.mmap | None = None

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the CPU."""
        stored = empty_stored(dtype, shape)
        if stored.numel():
            target = bytes_of(stored.numpy())
            if read_at(self._file, offset, target) < len(target):
                raise ValueError("it became shorter while it was read")
        return from_stored(stored, dtype)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is the file, where that can be, to be copied soon.

        Changing it changes no file.
        """
        numbers, in_file = file_dtype(dtype), stored_shape(dtype, shape)
        count = math.prod(in_file)
        if count * numbers.itemsize < _WORTH_MAPPING_BYTES or offset % numbers.itemsize:
            return self.read(offset, shape, dtype)
        try:
            mapping = self._map()
        except OSError:  # some network file systems can't
            return self.read(offset, shape, dtype)
        array = np.frombuffer(mapping, numbers, count, offset).reshape(in_file)
        return from_stored(torch.from_numpy(array), dtype)

    def _map(self) -> mmap.mmap:
        if self._mapping is None:
            # A private copy: torch has no read-only tensors, and no write may reach the file.
            # Never closed here, because tensors may still lie in it; the last one closes it.
            self._mapping = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapping
