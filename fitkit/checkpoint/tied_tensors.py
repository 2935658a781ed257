"""Tensors that several names stand for, read once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch


class TiedTensors:
    """Gives one tensor for each place in a file, as long as somebody uses it.

    Tied weights stay tied, and nothing is held in memory for whoever might ask again.
    """

    def __init__(self) -> None:
        self._used: weakref.WeakValueDictionary[Hashable, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def get(self, place: Hashable, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of a place; `read` makes it where nobody uses it now."""
        tensor = self._used.get(place)
        if tensor is None:
            tensor = self._used[place] = read()
        return tensor
