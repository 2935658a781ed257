"""One device, in the caller's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fitkit.distributed.launchers import InlineLauncher
from fitkit.distributed.precision import Precision
from fitkit.distributed.strategies.base import Strategy
from fitkit.errors import ConfigurationError


class SingleDevice(Strategy):
    """Trains on one device, in process."""

    name = "single_device"

    def __init__(self) -> None:
        super().__init__()
        self._launcher = InlineLauncher()

    def connect(
        self, devices: tuple[torch.device, ...], ids: tuple[int, ...], precision: Precision
    ) -> Strategy:
        if len(devices) != 1:
            raise ConfigurationError(
                f"{len(devices)} devices were asked for, but this version of fitkit trains on "
                "one device. Write devices=1 (or one index, like devices=[0])."
            )
        return super().connect(devices, ids, precision)

    @property
    def launcher(self) -> InlineLauncher:
        return self._launcher

    def place(self, module: torch.nn.Module) -> None:
        module.to(self.device)

    def door(self, module: torch.nn.Module) -> Callable[..., Any]:
        return module

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
