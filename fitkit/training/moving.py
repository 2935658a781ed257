"""Bringing a batch to the device, by fitkit's way or by the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fitkit.data.transfer import Transfer


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
        return self._own(batch, self.transfer.device)
