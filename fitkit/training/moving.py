"""Bringing a batch to the device, by fitkit's way or by the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fitkit.data.transfer import Transfer


def moved_by(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
    """A batch moved by a hook, which may also ask for Lightning's number of the loader: 0."""
    return own(batch, device, *([0] if len(inspect.signature(own).parameters) > 2 else []))


class Mover:
    """Brings a batch to the device.

    Args:
        transfer: fitkit's way.
        own: the model's `transfer_batch_to_device`, where it has its own.
    """

    def __init__(self, transfer: Transfer, own: Callable[..., Any] | None = None) -> None:
        self.transfer = transfer
        self._own = own
        self.move: Callable[[Any], Any] = transfer if own is None else self._moved

    def __call__(self, batch: Any) -> Any:
        """The batch on the device."""
        return self.move(batch)

    def _moved(self, batch: Any) -> Any:
        assert self._own is not None
        return moved_by(self._own, batch, self.transfer.device)
