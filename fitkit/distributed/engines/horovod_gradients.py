"""Gradients averaged by Horovod's engine while the backward pass goes on."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.distributed.world import World
from fitkit.errors import ConfigurationError, missing_package

NEVER = 2**30
"""Backward passes after which Horovod would exchange an accumulating group's gradients itself."""


def check_horovod() -> None:
    """Make sure that the package is there.

    Raises:
        MissingPackageError: it isn't.
    """
    if "horovod" not in sys.modules and importlib.util.find_spec("horovod") is None:
        raise missing_package("horovod", "horovod", "HorovodStrategy(engine='horovod')")


def join_horovod(world: World) -> Any:
    """Horovod's module for torch, initialised; once joined it stays so until the process ends.

    Ranks:
        Collective at the first call.

    Raises:
        MissingPackageError: it isn't there, or was built without torch.
        ConfigurationError: its ranks aren't those of the launcher.
    """
    check_horovod()
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise missing_package("horovod", "horovod", "HorovodStrategy(engine='horovod')") from error
    if not hvd.is_initialized():
        hvd.init()
    if (hvd.rank(), hvd.size()) != (world.rank, world.size):
        raise ConfigurationError(
            f"Horovod calls this process rank {hvd.rank()} of {hvd.size()}, but its launcher made "
            f"it rank {world.rank} of {world.size}. Start the script with horovodrun or mpirun, or "
            "write strategy='horovod', which needs no engine."
        )
    return hvd


class HorovodGradients:
    """Averages the gradients of an optimizer's parameters, until `end`.

    Horovod's `DistributedOptimizer` does it, around an optimizer that makes no updates: those are
    the user's own, which stays the object that schedulers and loss scaling know.

    Args:
        hvd: Horovod's module for torch.
        optimizer: whose parameters they are.
        compression: `"fp16"` or None.
    """

    def __init__(self, hvd: Any, optimizer: Optimizer, compression: str | None) -> None:
        self._learning = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._exchange: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self._learning, lr=0.0),
            compression=hvd.Compression.fp16 if compression else hvd.Compression.none,
        )
        self._waits = False

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients here meanwhile."""
        self._waits = True
        self._exchange.set_backward_passes_per_step(NEVER)
        try:
            yield
        finally:
            self._waits = False
            self._exchange.set_backward_passes_per_step(1)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients; they are averaged on return, unless they accumulate."""
        loss.backward()
        if not self._waits:
            self.average()

    def average(self) -> None:
        """Average what isn't yet.

        Ranks:
            Collective.
        """
        self._exchange.synchronize()

    def end(self) -> None:
        """Take Horovod's hooks off the parameters."""
        self._exchange._handles.clear()
        self._exchange._grad_accs.clear()  # with them go the graph's nodes that hold the hooks


def broadcast_state(hvd: Any, module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Give all ranks rank 0's parameters, buffers and optimizer states.

    Ranks:
        Collective.
    """
    hvd.broadcast_parameters(dict(module.state_dict()), root_rank=0)
    is_first = hvd.rank() == 0
    kept = [optimizer.state_dict() if optimizer.state else None for optimizer in optimizers]
    # Horovod matches exchanges by name, and would take the object's type for one.
    told = hvd.broadcast_object(kept if is_first else None, root_rank=0, name="fitkit.optimizers")
    for optimizer, state in zip(optimizers, told, strict=True):
        if state is not None and not is_first:
            optimizer.load_state_dict(state)
