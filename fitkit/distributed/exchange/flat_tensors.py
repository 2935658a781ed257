"""Several tensors as one vector, and back: one exchange instead of many."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch


class FlatTensors:
    """A view of floating tensors as one vector, in the widest of their dtypes, at least float32.

    Args:
        tensors: on one device; complex ones count as pairs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._held = list(tensors)
        self._sizes = [tensor.numel() for tensor in self._tensors]
        dtypes = (tensor.dtype for tensor in self._tensors)
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """The tensors as real ones; their memory may have changed since the last time."""
        found = [tensor.detach() for tensor in self._held]
        return [torch.view_as_real(t) if t.is_complex() else t for t in found]

    def read(self) -> torch.Tensor:
        """A vector of the tensors' numbers; a copy."""
        if not self._held:
            return torch.empty(0)
        return torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in self._tensors])

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Give the tensors a vector's numbers; none of them shares its memory afterwards."""
        for tensor, part in zip(self._tensors, vector.split(self._sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))

    @torch.no_grad()
    def add(self, vector: torch.Tensor) -> None:
        """Add a vector's numbers to the tensors'."""
        for tensor, part in zip(self._tensors, vector.split(self._sizes), strict=True):
            tensor.add_(part.view(tensor.shape))
