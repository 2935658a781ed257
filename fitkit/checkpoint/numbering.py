"""Numbers for the tensors that go into a file, one for each piece of memory."""

from __future__ import annotations

from typing import Any

import torch

from fitkit.checkpoint.dtypes import storable


class Numbering:
    """Collects the arrays of a file and gives each its number.

    Tensors that share all of their memory, such as tied weights, get one number, so they are
    stored once and are equal when they are read. Tensors that overlap in part are stored apart.
    """

    def __init__(self) -> None:
        self.arrays: list[torch.Tensor] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(self, value: object) -> int:
        """The number of `value`, a tensor or an array.

        Raises:
            ArgumentTypeError, ConfigurationError: it can't be written to a file.
        """
        tensor = storable(value)
        identity = _identity(tensor)
        number = self._numbers.get(identity, len(self.arrays))
        if number == len(self.arrays):
            # Kept in the list, so that its memory isn't given to another tensor meanwhile.
            self.arrays.append(tensor)
            self._numbers[identity] = number
        return number


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        str(tensor.device),
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
