"""What a strategy decides."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any, final

import torch
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.collectives import Collectives, NodeShares, Solo
from fitkit.distributed.devices import Machine, choose_kind
from fitkit.distributed.launchers import InlineLauncher, Launcher
from fitkit.distributed.meta_tensors import fill_meta
from fitkit.distributed.precision import FullPrecision, Precision
from fitkit.distributed.strategies.engine import Engine
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.modes import tensors_of


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The hardware that `compile`'s arguments mean in this process, for a strategy to take.

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


class Strategy:
    """Where a module is, who computes with it, and how the ranks keep together.

    The loops ask a strategy for what they need and never which one it is. What is here is right
    for one device; a subclass overrides what it decides otherwise. The gradients and updates of a
    training are made by an `Engine`, which it may return from `engine_for`.

    A class sets `name`, `starts`, `replicates`, `ranks_per_batch`, `context_parallel`,
    `has_engine` and `timeout`. The rest is set on the object, as a run goes on.

    Attributes:
        devices, device_ids, precision: set by `connect`: the devices of this node's ranks, in rank
            order; their indices; the number types of the run.
        world, launcher, reads_on_rank_zero: set by `connect` where there may be several ranks:
            this process's place among them; what brings them into a call; whether only rank 0 has
            the user's iterables, and hands batches out.
        collectives: set by `join` and `leave`: the exchanges between the ranks.
        engine: set by `fit`, to what `engine_for` gives; None where torch makes gradients and
            updates, and outside of a training.

    Example:
        >>> from fitkit.strategies import DDPStrategy, Strategy
        >>> issubclass(DDPStrategy, Strategy)
        True
    """

    name = ""
    """As users write it."""
    starts = "here"
    """How the ranks come to be where no launcher started them: `"here"` (there is one, the
    caller's process), `"workers"` (worker processes) or `"script"` (the script again);
    `"nodes"` is as `"here"`, and launchers may start one process on each node."""
    replicates = False
    """Whether a process can have several devices, with a replica of the module on each."""
    ranks_per_batch: int = 1
    """How many neighbouring ranks compute each batch together; the others see other data."""
    context_parallel: int = 1
    """Among how many of these ranks each sequence is divided."""
    has_engine = False
    """Whether a training may have an engine, which then decides how weights lie in memory."""
    timeout: timedelta | None = None
    """Bound of each exchange between ranks; None for torch's default."""

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.device_ids: tuple[int, ...] = (0,)
        self.precision: Precision = FullPrecision()
        self.world: World = World()
        self.collectives: Collectives = Solo()
        self.launcher: Launcher = InlineLauncher()
        self.reads_on_rank_zero = False
        self.engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks need: nothing of this process's group, launcher and training."""
        fresh = {"collectives": Solo(), "launcher": InlineLauncher(), "engine": None}
        return {**self.__dict__, **fresh}

    # ------------------------------------------------------------------ devices and ranks

    def choose_kind(self, accelerator: Any, machine: Machine) -> tuple[str, Machine]:
        """The kind of device that `accelerator` means, and the machine with its count of them.

        Raises:
            ConfigurationError: a kind that isn't there, or that this strategy can't use.
        """
        kind = choose_kind(accelerator, machine)
        if kind == "xla":
            raise ConfigurationError(
                f"strategy={self.name!r} can't use xla devices, which accelerator="
                f"{accelerator!r} means here. Write strategy='xla', or leave one of the two out."
            )
        return kind, machine

    def connect(self, assignment: Assignment) -> Strategy:
        """Take the devices that this run has; returns self.

        Raises:
            ConfigurationError: devices that this strategy can't use.
        """
        for device in assignment.devices:
            assignment.precision.check(device)
        self.devices = assignment.devices
        self.device_ids = assignment.ids
        self.precision = assignment.precision
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

    # ------------------------------------------------------------------ the module

    def place(self, module: torch.nn.Module, *, for_training: bool = False) -> None:
        """Bring the module to this rank's device, with rank 0's numbers.

        Args:
            for_training: whether a training follows; a module that its engine spreads may come
                to the device in parts then.
        """
        self.precision.convert(module)
        fill_meta(module)
        tensors = tensors_of(module)
        if not tensors or any(tensor.device != self.device for tensor in tensors):
            module.to(self.device)

    def wrap_for_training(
        self, module: torch.nn.Module, *, averages: bool = True, may_count: bool = False
    ) -> WrappedModel:
        """What training steps call.

        Args:
            averages: whether each backward pass averages its gradients over the ranks; else the
                loop does so before an update.
            may_count: whether losses may be means over something else than samples.

        Ranks:
            Collective.
        """
        return self.wrap_for_evaluation(module)

    def wrap_for_compiling(
        self, module: torch.nn.Module, *, may_count: bool = False
    ) -> WrappedModel | None:
        """What training steps of several ranks call that are compiled as a whole: nothing acts
        within them, and the loop averages the gradients, all in one exchange.

        Args:
            may_count: as in `wrap_for_training`.

        Returns:
            None where that would be another result, or slower; and on one rank.
        """
        return None

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        """What evaluation and prediction call. No rank waits in it for another's share, unless
        `evaluates_in_step` says so."""
        if self.engine is not None and self.engine.evaluates_in_step:
            return self.engine.wrap(module)
        return WrappedModel(module)

    # ------------------------------------------------------------------ a training

    def engine_for(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        """What makes a training's gradients and updates; None where torch does.

        Ranks:
            Collective.

        Raises:
            ConfigurationError: a module or an optimizer that this strategy can't train.
        """
        return None

    def finish(self) -> None:
        """Drop what a training needed; after a failure too, when other ranks may be gone."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abandon()

    # ------------------------------------------------------------------ what follows from these

    @final
    @property
    def replicas(self) -> int:
        """How many replicas of the module compute parts of a batch in this process."""
        return len(self.devices) if self.replicates else 1

    @final
    @property
    def data_ranks(self) -> Collectives:
        """By which data are dealt out and logs reduced: ranks that differ in what they see."""
        size, together = self.collectives.world_size, self.ranks_per_batch
        if size == 1 or together == 1:
            return self.collectives
        groups = [list(range(first, first + together)) for first in range(0, size, together)]
        return NodeShares(self.collectives, groups)

    @final
    @property
    def log_ranks(self) -> Collectives:
        """By which logs and metrics are reduced: ranks that have computed something else."""
        return self.collectives if self.context_parallel > 1 else self.data_ranks

    @final
    @property
    def data_rank_count(self) -> int:
        """How many shares the data are dealt into, outside of a run too."""
        return self.world.size // self.ranks_per_batch

    @final
    @property
    def evaluates_in_step(self) -> bool:
        """Whether a rank's forward waits for the others' now, so that all make equally many."""
        shares = self.context_parallel > 1 and self.collectives.world_size > 1
        return shares or (self.engine is not None and self.engine.evaluates_in_step)


class SingleDevice(Strategy):
    """Trains on one device, in process.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", strategy=fitkit.strategies.SingleDeviceStrategy())
    """

    name = "single_device"

    def connect(self, assignment: Assignment) -> Strategy:
        count = len(assignment.devices)
        if count != 1:
            raise ConfigurationError(
                f"strategy='single_device' has one device, but {count} were asked for. "
                "Write devices=1 (or one index, like devices=[0]), or strategy='ddp_spawn'."
            )
        return super().connect(assignment)
