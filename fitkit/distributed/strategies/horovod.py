"""Training in the ranks that horovodrun or mpirun started; on request by Horovod's own engine."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.arguments import check_choice
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.ddp import DDP
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import Door
from fitkit.errors import ConfigurationError, missing_package


class Horovod(DDP):
    """`DDP` in the ranks that horovodrun or mpirun started.

    The learning rate stays as it is given, unless `compile(scale_lr=…)` asks for another.

    Args:
        engine: what averages gradients: `"torch"` (DistributedDataParallel; the package isn't
            needed) or `"horovod"` (its `DistributedOptimizer`; needs horovodrun or mpirun). With
            several optimizers, and in steps that make the updates themselves, it is torch's
            process group in either case.
        compression: `"fp16"` sends gradients in half the bytes; None as they are.
        process_group_backend, timeout: as for `DDP`.

    Reference: Sergeev & Del Balso, Horovod: fast and easy distributed deep learning in
    TensorFlow, 2018, arXiv:1802.05799.
    """

    name = "horovod"
    starts = "workers"

    def __init__(
        self,
        engine: str = "torch",
        compression: str | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        check_choice("engine", engine, ("torch", "horovod"))
        check_choice("compression", compression, (None, "fp16"))
        hook: Callable[..., Any] | str | None = compression if engine == "torch" else None
        super().__init__(process_group_backend, timeout, comm_hook=hook)
        self.engine = engine
        self.compression = compression
        self._hvd: Any = None  # Horovod's module, between `join` and `leave`
        self._optimizer: Optimizer | None = None
        self._gradients: HorovodGradients | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hvd": None, "_optimizer": None, "_gradients": None}

    def connect(self, assignment: Assignment) -> Strategy:
        if self.engine == "horovod":
            check_horovod()
            count = len(assignment.devices)
            if assignment.cluster is None and count > 1:
                raise ConfigurationError(
                    f"Horovod's engine works in ranks that its launcher starts. Start the script "
                    f"with horovodrun -np {count} python …, or write strategy='horovod'."
                )
            if assignment.precision.name == "bf16-true":
                raise ConfigurationError(
                    "precision='bf16-true' can't be kept with Horovod's engine, which sends no "
                    "bfloat16. Write 'bf16-mixed', or strategy='horovod'."
                )
        return super().connect(assignment)

    def join(self, store: Store | None = None) -> None:
        super().join(store)
        if self.engine == "horovod" and self.collectives.world_size > 1:
            self._hvd = join_horovod(self.world)

    def leave(self) -> None:
        super().leave()
        self._hvd = None

    # ------------------------------------------------------------------ learning

    def door(self, module: nn.Module) -> Door:
        return super().door(module) if self._hvd is None else self.plain_door(module)

    def begin_training(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self._hvd is None:
            return
        broadcast_state(self._hvd, module, optimizers)
        if len(optimizers) == 1 and getattr(module, "automatic_optimization", True):
            self._optimizer = optimizers[0]
            self._gradients = HorovodGradients(self._hvd, optimizers[0], self.compression)

    def rewrap(self) -> None:
        super().rewrap()
        if self._gradients is not None and self._optimizer is not None:
            self._gradients.end()
            self._gradients = HorovodGradients(self._hvd, self._optimizer, self.compression)

    def accumulating(self) -> AbstractContextManager[Any]:
        return super().accumulating() if self._gradients is None else self._gradients.accumulating()

    def backward(self, loss: torch.Tensor) -> None:
        if self._gradients is None:
            super().backward(loss)
        else:
            self._gradients.backward(loss)

    def exchange_gradients(self, parameters: list[nn.Parameter]) -> None:
        if self._gradients is None:
            super().exchange_gradients(parameters)
        else:
            self._gradients.average()

    def finish(self) -> None:
        super().finish()
        gradients, self._gradients, self._optimizer = self._gradients, None, None
        if gradients is not None:
            gradients.end()


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
