"""Training in ranks that horovodrun or mpirun started, optionally with Horovod's own engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.arguments import check_choice
from fitkit.errors import ConfigurationError, missing_package, require
from fitkit.extras.ddp import DDP
from fitkit.seams.strategies import Assignment, Engine, Strategy, World, held_by


class Horovod(DDP):
    """`DDP` in the ranks that horovodrun or mpirun started.

    The learning rate stays as you give it, unless you write `compile(scale_lr=…)`.

    Args:
        engine: what averages the gradients: `"torch"` (DistributedDataParallel, without the Horovod
            package) or `"horovod"` (its `DistributedOptimizer`, which needs horovodrun or
            mpirun). With several optimizers, and in steps that make the updates themselves, torch's
            process group does it in either case.
        compression: `"fp16"` sends gradients in half the bytes. None sends them as they are.
        process_group_backend, timeout, output: as for `DDP`.

    Reference: Sergeev & Del Balso, Horovod: fast and easy distributed deep learning in
    TensorFlow, 2018, arXiv:1802.05799.

    Example:
        >>> import fitkit
        >>> strategy = fitkit.strategies.HorovodStrategy()
    """

    name = "horovod"
    starts = "workers"
    has_engine = True

    def __init__(
        self,
        engine: str = "torch",
        compression: str | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
        output: str | None = None,
    ) -> None:
        engine = check_choice("engine", engine, ("torch", "horovod"))
        compression = check_choice("compression", compression, (None, "fp16"))
        hook: Callable[..., Any] | str | None = compression if engine == "torch" else None
        super().__init__(process_group_backend, timeout, comm_hook=hook, output=output)
        self.averager = engine
        self.compression = compression

    def connect(self, assignment: Assignment) -> Strategy:
        if self.averager == "horovod":
            require("horovod", "horovod", PURPOSE)
            count = len(assignment.devices)
            if assignment.cluster is None and count > 1:
                raise ConfigurationError(
                    f"Horovod's engine works in ranks that its launcher starts. Start the script "
                    f"with horovodrun -np {count} python …, or write strategy='horovod'."
                )
            if assignment.precision.name == "bf16-true":
                raise ConfigurationError(
                    "precision='bf16-true' can't be used with Horovod's engine, which doesn't send "
                    "bfloat16. Write 'bf16-mixed', or strategy='horovod'."
                )
        return super().connect(assignment)

    def join(self, store: Store | None = None) -> None:
        super().join(store)
        if self._averages_here:
            join_horovod(self.world)

    @property
    def _averages_here(self) -> bool:
        """Whether Horovod's engine averages the gradients of this call."""
        return self.averager == "horovod" and self.collectives.world_size > 1

    # ------------------------------------------------------------------ learning

    def engine_for(self, module: nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        if not self._averages_here:
            return None
        hvd = join_horovod(self.world)
        broadcast_state(hvd, module, optimizers)
        if not getattr(module, "_updates_all", True):
            return None
        return HorovodGradients(hvd, optimizers, self.compression)


PURPOSE = "HorovodStrategy(engine='horovod')"
"""What needs the package."""

NEVER = 2**30
"""The number of backward passes after which Horovod would exchange accumulated gradients itself."""


def join_horovod(world: World) -> Any:
    """Return Horovod's module for torch, initialised. It stays so until the process ends.

    Ranks:
        Collective at the first call.

    Raises:
        MissingPackageError: it isn't installed, or was built without torch.
        ConfigurationError: its ranks aren't those of the launcher.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise missing_package("horovod", "horovod", PURPOSE) from error
    if not hvd.is_initialized():
        hvd.init()
    if (hvd.rank(), hvd.size()) != (world.rank, world.size):
        raise ConfigurationError(
            f"Horovod calls this process rank {hvd.rank()} of {hvd.size()}, but its launcher made "
            f"it rank {world.rank} of {world.size}. Start the script with horovodrun or mpirun, or "
            "write strategy='horovod', which needs no engine."
        )
    return hvd


class HorovodGradients(Engine):
    """Averages the gradients of the optimizers' parameters.

    Horovod's `DistributedOptimizer` does it, around an optimizer that makes no updates. The user's
    own optimizer makes them. It stays the object that schedulers and loss scaling know.

    Args:
        hvd: Horovod's module for torch.
        optimizers: the optimizers of the parameters.
        compression: `"fp16"` or None.
    """

    replaces_ddp = True

    def __init__(self, hvd: Any, optimizers: list[Optimizer], compression: str | None) -> None:
        self._hvd = hvd
        self._optimizers = optimizers
        self._compression = hvd.Compression.fp16 if compression else hvd.Compression.none
        self._waits = False
        self._exchange = self._new_exchange()

    def _new_exchange(self) -> Any:
        learning = [
            parameter
            for optimizer in self._optimizers
            for parameter in held_by(optimizer)
            if parameter.requires_grad
        ]
        return self._hvd.DistributedOptimizer(
            torch.optim.SGD(learning, lr=0.0), compression=self._compression
        )

    def rewrap(self) -> None:
        self.abandon()
        self._exchange = self._new_exchange()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients on this rank within the block."""
        self._waits = True
        self._exchange.set_backward_passes_per_step(NEVER)
        try:
            yield
        finally:
            self._waits = False
            self._exchange.set_backward_passes_per_step(1)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients. They are averaged on return, unless they accumulate."""
        loss.backward()
        if not self._waits:
            self._exchange.synchronize()

    def average_gradients(self, parameters: list[nn.Parameter]) -> bool:
        self._exchange.synchronize()
        return True

    def end(self, *, wanted: bool) -> None:
        self.abandon()

    def abandon(self) -> None:
        # Remove Horovod's hooks from the parameters: it has no way to do it.
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
    states = hvd.broadcast_object(kept if is_first else None, root_rank=0, name="fitkit.optimizers")
    for optimizer, state in zip(optimizers, states, strict=True):
        if state is not None and not is_first:
            optimizer.load_state_dict(state)
