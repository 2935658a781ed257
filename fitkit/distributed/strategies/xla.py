"""Data parallelism on XLA devices (TPUs), by way of an adapter to the package that drives them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.distributed.collectives import ProcessGroup
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.ddp import DDP
from fitkit.distributed.world import enter
from fitkit.distributed.wrapped_model import Door
from fitkit.distributed.xla_adapters import Adapter, adapter_of
from fitkit.errors import ConfigurationError, WorkerError


class XLA(DDP):
    """Each XLA device has a process and a copy of the module; gradients are averaged between.

    What the ranks say to each other about data and logs goes over the CPU, gradients over the
    devices' own network. An instance of an optimizer can't be given: the module gets new
    parameters when it comes to the device. Give its name, a class or `configure_optimizers`.

    Args:
        adapter: what drives the devices: `"torch_tpu"`, `"torch_xla"`, None for the first of them
            that is installed, or an object with an adapter's six calls
            (`fitkit.strategies.XLAAdapter`).
        timeout: as for `DDP`.
    """

    name = "xla"
    starts = "workers"
    kinds = ("xla",)

    def __init__(
        self, adapter: str | Adapter | None = None, *, timeout: float | timedelta | None = None
    ) -> None:
        super().__init__(timeout=timeout)
        self._asked = adapter
        # A package is looked for when it is needed.
        is_named = adapter is None or isinstance(adapter, str)
        self._adapter: Adapter | None = None if is_named else adapter_of(adapter)
        self._claimed: torch.device | None = None
        self._module: nn.Module | None = None  # whose gradients `backward` averages
        self._waits = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_claimed": None, "_module": None}

    @property
    def adapter(self) -> Adapter:
        """What drives the devices.

        Raises:
            MissingPackageError: no package does.
        """
        if self._adapter is None:
            self._adapter = adapter_of(self._asked)
        return self._adapter

    def device_count(self) -> int:
        return self.adapter.count()

    def connect(self, assignment: Assignment) -> Strategy:
        ids = assignment.ids
        if ids != tuple(range(len(ids))):
            raise ConfigurationError(
                f"devices={list(ids)!r} chooses among XLA devices, which processes get in their "
                f"order. Write devices={len(ids)}."
            )
        super().connect(assignment)
        if assignment.cluster is None:
            self.adapter.launch(self.world.size)
        return self

    @property
    def device(self) -> torch.device:
        if self._claimed is None:
            self._claimed = self.adapter.device(self.world, len(self.devices))
        return self._claimed

    def init_dist_connection(self, store: Store | None = None) -> tuple[Any, bool]:
        device = self.device
        group = enter(self.world, torch.device("cpu"), store, self.adapter.backend, self.timeout)
        if self.world.size == 1:
            return group
        reached = self.adapter.world_size()
        if reached != self.world.size:
            raise WorkerError(
                f"There are {self.world.size} ranks, but the devices' own exchanges reach "
                f"{reached} processes. Start one process for each device: all that a machine has."
            )
        return HostGroup(device, self.adapter), group[1]

    # ------------------------------------------------------------------ the module

    def door(self, module: nn.Module) -> Door:
        return self.plain_door(module)

    def evaluation_door(self, module: nn.Module) -> Door:
        return _SteppingDoor(module, self.adapter)

    def begin_training(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        # Several optimizers' losses, and losses in a step of the user's, have their own exchange.
        alone = len(optimizers) == 1 and getattr(module, "automatic_optimization", True)
        self._module = module if alone else None

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._module is not None and not self._waits:
            self.exchange_gradients(list(self._module.parameters()))

    def after_update(self) -> None:
        self.adapter.step()

    def finish(self) -> None:
        super().finish()
        self._module = None


class _SteppingDoor(Door):
    """Has each batch computed before the next is noted, where nothing else asks for numbers."""

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        super().__init__(module)
        self._adapter = adapter

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._adapter.step()
        return super().__call__(method, *args, **kwargs)


class Sums(Protocol):
    """Sums tensors over the ranks, on their devices."""

    def sum(self, tensors: list[torch.Tensor]) -> None: ...


class HostGroup(ProcessGroup):
    """Exchanges by way of the CPU, but for gradients, which stay on the devices.

    Args:
        device: this rank's.
        sums: exchanges what is there.
    """

    def __init__(self, device: torch.device, sums: Sums) -> None:
        super().__init__(torch.device("cpu"))
        self._place = device
        self._sums = sums

    @torch.no_grad()
    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        copies = [tensor.detach().cpu() for tensor in tensors]
        super().broadcast_tensors(copies)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    @torch.no_grad()
    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        held = [parameter for parameter in parameters if parameter.requires_grad]
        # Told on the CPU: looking at numbers on the device would interrupt it at each step.
        everyone = self.gather([parameter.grad is not None for parameter in held])
        used = [p for p, *users in zip(held, *everyone, strict=True) if any(users)]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in used if parameter.grad is not None]
        if gradients:
            self._sums.sum(gradients)
            torch._foreach_div_(gradients, self.world_size)

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().join_rows(tensor.cpu()).to(self._place)
