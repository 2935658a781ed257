"""One device, in the caller's process."""

from __future__ import annotations

from fitkit.distributed.assignment import Assignment
from fitkit.distributed.strategies.base import Strategy
from fitkit.errors import ConfigurationError


class SingleDevice(Strategy):
    """Trains on one device, in process."""

    name = "single_device"

    def connect(self, assignment: Assignment) -> Strategy:
        count = len(assignment.devices)
        if count != 1:
            raise ConfigurationError(
                f"strategy='single_device' has one device, but {count} were asked for. "
                "Write devices=1 (or one index, like devices=[0]), or strategy='ddp_spawn'."
            )
        return super().connect(assignment)
