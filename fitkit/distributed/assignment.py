"""What `compile`'s words about hardware come to, for this process."""

from __future__ import annotations

import dataclasses

import torch

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.precision import Precision


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a strategy gets to work with.

    Attributes:
        devices: of this node's ranks, in rank order.
        ids: their indices.
        precision: the number types of the run.
        cluster: this process's place among the ranks that a launcher started; None where the
            strategy starts them itself.
    """

    devices: tuple[torch.device, ...]
    ids: tuple[int, ...]
    precision: Precision
    cluster: Cluster | None = None
