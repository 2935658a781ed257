"""Data parallelism on XLA devices (TPUs), by an adapter to the package that drives them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.ddp import DDP
from fitkit.extras.launchers.group import enter
from fitkit.extras.launchers.process_group import ProcessGroup
from fitkit.extras.xla_adapters import Adapter, adapter_of
from fitkit.seams.machines import Machine, choose_kind
from fitkit.seams.strategies import Assignment, Engine, Strategy, World, WrappedModel


class XLA(DDP):
    """Runs one process with a copy of the module per XLA device, and averages the gradients.

    The ranks exchange data and logs over the CPU, and gradients over the devices' own network. Give
    the optimizer by name, by class or in `configure_optimizers`. An instance can't be used, because
    the module gets new parameters when it moves to the device.

    Args:
        adapter: the package that drives the devices: `"torch_tpu"` or `"torch_xla"`. None uses the
            first one installed. Or pass an object with an adapter's six methods
            (`fitkit.strategies.XLAAdapter`).
        timeout, output: as for `DDP`.

    Example:
        >>> import fitkit
        >>> strategy = fitkit.strategies.XLAStrategy()
    """

    name = "xla"
    starts = "workers"
    has_engine = True

    def __init__(
        self,
        adapter: str | Adapter | None = None,
        *,
        timeout: float | timedelta | None = None,
        output: str | None = None,
    ) -> None:
        super().__init__(timeout=timeout, output=output)
        self._asked = adapter
        # The package is looked for when it is needed.
        is_named = adapter is None or isinstance(adapter, str)
        self._adapter: Adapter | None = None if is_named else adapter_of(adapter)
        self._claimed: tuple[World, torch.device] | None = None  # each rank claims its own

    @property
    def adapter(self) -> Adapter:
        """The adapter that drives the devices.

        Raises:
            MissingPackageError: no such package is installed.
        """
        if self._adapter is None:
            self._adapter = adapter_of(self._asked)
        return self._adapter

    def choose_kind(self, accelerator: Any, machine: Machine) -> tuple[str, Machine]:
        machine = dataclasses.replace(machine, xla_count=self.adapter.count())
        is_auto = isinstance(accelerator, str) and accelerator.strip().lower() == "auto"
        kind = choose_kind("xla" if is_auto else accelerator, machine)
        if kind != "xla":
            raise ConfigurationError(
                f"strategy={self.name!r} can't use {kind} devices, which accelerator="
                f"{accelerator!r} means here. Write accelerator='tpu', or leave one of the two out."
            )
        return kind, machine

    def connect(self, assignment: Assignment) -> Strategy:
        ids = assignment.ids
        if ids != tuple(range(len(ids))):
            raise ConfigurationError(
                f"devices={list(ids)!r} chooses among XLA devices, but processes get them in "
                f"order. Write devices={len(ids)}."
            )
        super().connect(assignment)
        if assignment.cluster is None:
            self.adapter.launch(self.world.size)
        return self

    @property
    def device(self) -> torch.device:
        if self._claimed is None or self._claimed[0] != self.world:
            self._claimed = self.world, self.adapter.device(self.world, len(self.devices))
        return self._claimed[1]

    def init_dist_connection(self, store: Store | None = None) -> tuple[Any, bool]:
        device = self.device
        group = enter(self.world, torch.device("cpu"), store, self.adapter.backend, self.timeout)
        if self.world.size == 1:
            return group
        reached = self.adapter.world_size()
        if reached != self.world.size:
            raise WorkerError(
                f"There are {self.world.size} ranks, but the devices' own exchanges reach "
                f"{reached} processes. Start one process for each device of the machine."
            )
        return HostGroup(device, self.adapter), group[1]

    # ------------------------------------------------------------------ the module

    def wrap_for_evaluation(self, module: nn.Module) -> WrappedModel:
        wrapped = WrappedModel(module)

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            # Compute each batch before the next is recorded, if nothing else reads the values.
            self.adapter.step()
            return wrapped.call(method, *args, **kwargs)

        wrapped.wrapper = call
        return wrapped

    def engine_for(self, module: nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        # Several optimizers' losses, and losses in the user's own step, have their own exchange.
        averages = getattr(module, "_updates_all", True)
        return XLAEngine(self, list(module.parameters()) if averages else [])


class XLAEngine(Engine):
    """Averages gradients once they are computed, and runs each step's computation at its end.

    Args:
        strategy: the training's strategy.
        parameters: the parameters whose gradients `backward` averages.
    """

    replaces_ddp = True

    def __init__(self, strategy: XLA, parameters: list[nn.Parameter]) -> None:
        self._strategy = strategy
        self._parameters = parameters
        self._waits = False

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self._parameters and not self._waits:
            self._strategy.collectives.mean_gradients(self._parameters)

    def after_update(self) -> None:
        self._strategy.adapter.step()


class HostGroup(ProcessGroup):
    """Exchanges over the CPU, except for gradients, which stay on the devices.

    Args:
        device: this rank's device.
        adapter: exchanges what is on the devices.
    """

    def __init__(self, device: torch.device, adapter: Adapter) -> None:
        super().__init__(torch.device("cpu"))
        self._rank_device = device
        self._adapter = adapter

    @torch.no_grad()
    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        copies = [tensor.detach().cpu() for tensor in tensors]
        super().broadcast_tensors(copies)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    @torch.no_grad()
    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        held = [parameter for parameter in parameters if parameter.requires_grad]
        # Gathered on the CPU: reading values from the device would interrupt it at each step.
        everyone = self.gather([parameter.grad is not None for parameter in held])
        used = [p for p, *users in zip(held, *everyone, strict=True) if any(users)]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in used if parameter.grad is not None]
        if gradients:
            self._adapter.sum(gradients)
            torch._foreach_div_(gradients, self.world_size)

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().join_rows(tensor.cpu()).to(self._rank_device)
