"""What a strategy decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fitkit.distributed.launchers import Launcher
from fitkit.distributed.precision import FullPrecision, Precision


class Strategy:
    """How a module lives and learns across the ranks.

    The loops ask a strategy for what they need and never which one it is.

    Attributes:
        name: as users write it.
        devices: this run's devices in rank order.
        precision: the number types of the run.
        world_size: how many ranks there are.
        global_rank: this rank among all, from 0.
        local_rank: this rank among those of its node, from 0.
    """

    name = ""
    world_size = 1
    global_rank = 0
    local_rank = 0

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.device_ids: tuple[int, ...] = (0,)
        self.precision: Precision = FullPrecision()

    def connect(
        self, devices: tuple[torch.device, ...], ids: tuple[int, ...], precision: Precision
    ) -> Strategy:
        """Take the devices that this run has; returns self.

        Raises:
            ConfigurationError: devices that this strategy can't use.
        """
        self.devices = devices
        self.device_ids = ids
        self.precision = precision
        return self

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.devices[self.local_rank]

    @property
    def launcher(self) -> Launcher:
        """What brings the ranks into a call."""
        raise NotImplementedError

    def place(self, module: torch.nn.Module) -> None:
        """Bring the module to this rank's device."""
        raise NotImplementedError

    def door(self, module: torch.nn.Module) -> Callable[..., Any]:
        """The way into the module's forward for training steps."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        raise NotImplementedError
