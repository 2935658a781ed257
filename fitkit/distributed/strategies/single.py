"""One device, in the caller's process."""

from __future__ import annotations

import torch

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.precision import Precision
from fitkit.distributed.strategies.base import Strategy
from fitkit.errors import ConfigurationError


class SingleDevice(Strategy):
    """Trains on one device, in process."""

    name = "single_device"

    def connect(
        self,
        devices: tuple[torch.device, ...],
        ids: tuple[int, ...],
        precision: Precision,
        cluster: Cluster | None = None,
    ) -> Strategy:
        if len(devices) != 1:
            raise ConfigurationError(
                f"strategy='single_device' has one device, but {len(devices)} were asked for. "
                "Write devices=1 (or one index, like devices=[0]), or strategy='ddp_spawn'."
            )
        return super().connect(devices, ids, precision, cluster)
