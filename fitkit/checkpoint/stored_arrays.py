"""The numbers of arrays at known places in a checked file, copied to where they are wanted.

The file is read and never mapped: where another process cuts a mapped file, or the disk fails, the
system ends the process that looks at it.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
import torch

from fitkit.checkpoint.dtypes import empty_stored, from_stored, to_stored
from fitkit.checkpoint.file_parts import read_at, state_of


class StoredArrays:
    """Arrays in an open file, each said by its place, shape and dtype, which were checked.

    Every method raises ValueError where the bytes aren't what they have to be, and OSError where
    they can't be read.

    Args:
        file: open to read.
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
        target = memoryview(numbers.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        count = read_at(self._file, offset, target)
        if count < len(target):
            raise ValueError("became shorter while it was read")
        if state_of(self._file) != self._state:
            raise ValueError("was written to while it was read")


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
