"""The numbers of arrays at known places in an open file, copied to and from tensors.

The file is read and never mapped: where another process cuts a mapped file, or the disk fails, the
system ends the process that looks at it.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import numpy as np
import torch

from fitkit.checkpoint.dtypes import empty_stored, from_stored, to_stored

# What is written at once: Linux now and then stalls for long over writes of many megabytes.
_WRITTEN_BYTES = 1 << 20


def write_array(file: BinaryIO, offset: int, tensor: torch.Tensor) -> None:
    """Write a tensor's numbers at a place in a file that is open to write."""
    file.seek(offset)
    content = _bytes_of(to_stored(tensor))
    for start in range(0, len(content), _WRITTEN_BYTES):
        file.write(content[start : start + _WRITTEN_BYTES])


def state_of(file: BinaryIO) -> tuple[int, int]:
    """What differs after somebody has written to the file: its size, when it was written to."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


class StoredArrays:
    """Arrays in an open file, each said by its place, shape and dtype, which were checked.

    Every method raises ValueError where the bytes aren't what they have to be, and OSError where
    they can't be read.

    Args:
        file: open to read, unbuffered.
        state: its `state_of` before it was checked; what was written to it since is refused.
    """

    def __init__(self, file: BinaryIO, state: tuple[int, int]) -> None:
        self._file = file
        self._state = state

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the CPU."""
        stored = empty_stored(dtype, shape)
        self._fill(offset, stored.numpy())
        return from_stored(stored, dtype)

    def read_into(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy the array of a tensor's shape and dtype into it; straight where that can be.

        After an error it may have some of the file's numbers.
        """
        if takes_bytes(tensor):
            self._fill(offset, to_stored(tensor))
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return
        numbers = self.read(offset, tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            tensor.copy_(numbers)

    def _fill(self, offset: int, numbers: np.ndarray[Any, Any]) -> None:
        target = _bytes_of(numbers)
        self._file.seek(offset)
        while target:  # the system reads at most 2 GiB at once
            count = self._file.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise ValueError("became shorter while it was read")
            target = target[count:]
        if state_of(self._file) != self._state:
            raise ValueError("was written to while it was read")


def _bytes_of(numbers: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(numbers.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Whether a file's bytes can be read straight into a tensor's memory.

    Not those of booleans, of which only two are allowed.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.dtype != torch.bool
        and not (tensor.is_conj() or tensor.is_neg())
    )
