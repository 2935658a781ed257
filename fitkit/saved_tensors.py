"""How much memory autograd keeps from forward passes for backward passes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

import torch


class SavedTensors:
    """Counts the bytes that autograd keeps while it is entered; shared memory counts once.

    Args:
        apart_from: tensors that are there anyway, such as parameters.

    Attributes:
        peak: the most bytes that were kept at one time.
    """

    def __init__(self, apart_from: Iterable[torch.Tensor] = ()) -> None:
        self.peak = 0
        self._bytes = 0
        self._holders: Counter[int] = Counter()
        self._apart = {_storage(tensor) for tensor in apart_from}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _kept)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        storage = _storage(tensor)
        if storage not in self._apart:
            size = tensor.untyped_storage().nbytes()
            self._holders[storage] += 1
            if self._holders[storage] == 1:
                self._bytes += size
                self.peak = max(self.peak, self._bytes)
            weakref.finalize(kept, self._released, storage, size).atexit = False
        return kept

    def _released(self, storage: int, size: int) -> None:
        self._holders[storage] -= 1
        if self._holders[storage] == 0:
            self._bytes -= size


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _kept(kept: _Kept) -> torch.Tensor:
    return kept.tensor


def _storage(tensor: torch.Tensor) -> int:
    """What tensors over the same memory have in common, without memory too."""
    return tensor.untyped_storage()._cdata
