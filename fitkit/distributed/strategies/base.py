"""What a strategy decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.collectives import Collectives, Solo
from fitkit.distributed.launchers import InlineLauncher, Launcher
from fitkit.distributed.precision import FullPrecision, Precision
from fitkit.distributed.world import World


class Strategy:
    """How a module lives and learns across the ranks.

    The loops ask a strategy for what they need and never which one it is. A strategy of your
    own overrides what it decides otherwise; what is here is right for one device.

    Attributes:
        name: as users write it.
        devices: the devices of this node's ranks, in rank order.
        device_ids: their indices.
        precision: the number types of the run.
        world: this process's place among the ranks.
        collectives: what the ranks say to each other, between `join` and `leave`.
        launcher: what brings the ranks into a call.
        reads_on_rank_zero: whether only rank 0 has the user's iterables, and hands batches out.
    """

    name = ""
    starts = "here"
    """How the ranks come to be where no launcher started them: `"here"` (there is one, the
    caller's process), `"workers"` (worker processes) or `"script"` (the script again)."""
    timeout: timedelta | None = None
    """Bound of each exchange between ranks; None for torch's default."""

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.device_ids: tuple[int, ...] = (0,)
        self.precision: Precision = FullPrecision()
        self.world = World()
        self.collectives: Collectives = Solo()
        self.launcher: Launcher = InlineLauncher()
        self.reads_on_rank_zero = False

    def connect(
        self,
        devices: tuple[torch.device, ...],
        ids: tuple[int, ...],
        precision: Precision,
        cluster: Cluster | None = None,
    ) -> Strategy:
        """Take the devices that this run has; returns self.

        Args:
            devices: of this node's ranks, in rank order.
            ids: their indices.
            precision: the number types of the run.
            cluster: this process's place among the ranks that a launcher started; None where
                the strategy starts them itself.

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
        return self.devices[min(self.world.local_rank, len(self.devices) - 1)]

    def join(self, store: Store | None = None) -> None:
        """Enter the ranks' process group, where there are several.

        Ranks:
            Collective.
        """

    def leave(self) -> None:
        """Leave it."""

    def place(self, module: torch.nn.Module) -> None:
        """Bring the module to this rank's device, with rank 0's numbers."""
        module.to(self.device)

    def door(self, module: torch.nn.Module) -> Callable[..., Any]:
        """The way into the module's forward for training steps."""
        return module

    def before_evaluation(self, module: torch.nn.Module) -> None:
        """Make the ranks' modules agree before they evaluate."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Surrounds the steps whose gradients need no exchange yet."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def exchange_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Exchange gradients that were computed while `accumulating`."""

    def finish(self) -> None:
        """Drop what a training needed."""
