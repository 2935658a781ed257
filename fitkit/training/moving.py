"""Bringing batches to the device, by fitkit's way or by the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fitkit.data.to_device import CudaStreams, Transfer, fed, keep_on_device


def moved_by(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
    """A batch moved by a hook, which may also ask for Lightning's number of the loader: 0."""
    return own(batch, device, *([0] if len(inspect.signature(own).parameters) > 2 else []))


class Mover:
    """Brings batches to the device.

    Args:
        transfer: fitkit's way.
        own: the model's `transfer_batch_to_device`, where it has its own; it is called in the step,
            on the stream that computes.
        streams: makes the device's streams, where batches are copied beside what is computed.
            Default: CUDA's, on a CUDA device.
    """

    def __init__(
        self,
        transfer: Transfer,
        own: Callable[..., Any] | None = None,
        streams: Callable[[torch.device], Any] | None = None,
    ) -> None:
        self.transfer = transfer
        self._own = own
        self.move: Callable[[Any], Any] = transfer if own is None else self._moved
        if streams is None and transfer.device.type == "cuda":
            streams = CudaStreams
        self._make_streams = streams if own is None else None
        self._streams: Any = None

    def __call__(self, batch: Any) -> Any:
        """The batch on the device."""
        return self.move(batch)

    def leaves(self, batch: Any) -> bool:
        """Whether nothing is done to a batch, nor to others of the same tensors."""
        return self._own is None and self.transfer(batch) is batch

    def fed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A pass's batches; on a GPU copied there while it computes those before them."""
        streams = self._own_streams()
        return batches if streams is None else fed(batches, self.transfer, streams)

    def keep(self, source: Any) -> None:
        """Bring in-memory data that are read more than once to a GPU whole, if they fit there."""
        streams = self._own_streams()
        if streams is not None:
            move = Transfer(self.transfer.device, self.transfer.float_dtype)
            keep_on_device(source, move, streams.free_bytes)

    def _own_streams(self) -> Any:
        """The device's streams; None where batches aren't copied beside what is computed."""
        if self._streams is None and self._make_streams is not None:
            self._streams = self._make_streams(self.transfer.device)
            self.transfer.pin = self._streams.pinned
        return self._streams

    def _moved(self, batch: Any) -> Any:
        assert self._own is not None
        return moved_by(self._own, batch, self.transfer.device)
