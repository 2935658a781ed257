"""What a strategy decides."""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.collectives import Collectives, Solo
from fitkit.distributed.devices import Machine, choose_kind
from fitkit.distributed.launchers import InlineLauncher, Launcher
from fitkit.distributed.meta_tensors import fill_meta
from fitkit.distributed.precision import FullPrecision, Precision
from fitkit.distributed.strategies.engine import Engine
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a strategy gets to work with: what `compile`'s words about hardware mean here.

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

    The loops ask a strategy for what they need and never which one it is. A strategy of your
    own overrides what it decides otherwise; what is here is right for one device. How gradients
    and updates are made is an `Engine`'s, which it may return from `engine_for`.

    Attributes:
        name: as users write it.
        devices: the devices of this node's ranks, in rank order.
        device_ids: their indices.
        precision: the number types of the run.
        world: this process's place among the ranks.
        collectives: what the ranks say to each other, between `join` and `leave`.
        launcher: what brings the ranks into a call.
        reads_on_rank_zero: whether only rank 0 has the user's iterables, and hands batches out.
        engine: what makes the gradients and updates of the training that is under way; None where
            torch does, and outside of a training.
        count_parameter: a parameter () whose gradient is averaged over the ranks together with the
            module's, as it is and exactly; None where there is none. What counts on each rank
            travels as that.
    """

    name = ""
    starts = "here"
    """How the ranks come to be where no launcher started them: `"here"` (there is one, the
    caller's process), `"workers"` (worker processes) or `"script"` (the script again);
    `"nodes"` is as `"here"`, and launchers may start one process on each node."""
    replicates = False
    """Whether a process can have several devices, with a replica of the module on each."""
    has_engine = False
    """Whether a training may have an engine, which then decides how weights lie in memory."""
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
        self.engine: Engine | None = None
        self.count_parameter: torch.nn.Parameter | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks need: nothing of this process's group, launcher and training."""
        own = {"collectives": Solo(), "launcher": InlineLauncher()}
        return {**self.__dict__, **own, "engine": None, "count_parameter": None}

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

        Args:
            assignment: what `compile` was given comes to, for this process.

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

    @property
    def replicas(self) -> int:
        """How many replicas of the module compute parts of a batch in this process."""
        return len(self.devices) if self.replicates else 1

    @property
    def data_ranks(self) -> Collectives:
        """By which data are dealt out and logs reduced: ranks that differ in what they see."""
        return self.collectives

    @property
    def data_rank_count(self) -> int:
        """How many shares the data are dealt into, outside of a run too."""
        return self.world.size

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
        module.to(self.device)

    def wrap_for_training(
        self, module: torch.nn.Module, *, averages: bool = True, may_count: bool = False
    ) -> WrappedModel:
        """What training steps call.

        Args:
            averages: whether each backward pass averages its gradients over the ranks; else the
                loop asks `exchange_gradients` to.
            may_count: whether losses may be means over something else than samples.

        Ranks:
            Collective.
        """
        return self.wrap_for_evaluation(module)

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        """What evaluation and prediction call. No rank waits in it for another's share, unless
        `evaluates_in_step` says so."""
        if self.engine is not None and self.engine.evaluates_in_step:
            return self.engine.wrap(module)
        return WrappedModel(module)

    @property
    def evaluates_in_step(self) -> bool:
        """Whether a rank's forward waits for the others' now, so that all make equally many."""
        return self.engine is not None and self.engine.evaluates_in_step

    def before_evaluation(self, module: torch.nn.Module) -> None:
        """Make the ranks' modules agree before they evaluate."""

    # ------------------------------------------------------------------ a training

    def engine_for(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        """What makes a training's gradients and updates; None where torch does.

        Ranks:
            Collective.

        Raises:
            ConfigurationError: a module or an optimizer that this strategy can't train.
        """
        return None

    def begin_training(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        """Make the engine, before a training's first step.

        Ranks:
            Collective.
        """
        self.engine = self.engine_for(module, optimizers)

    def end_training(self) -> None:
        """Have the engine give module and optimizers back; not called after a failure.

        Ranks:
            Collective.
        """
        if self.engine is not None:
            # Workers' models are thrown away after a call.
            self.engine.end(wanted=self.collectives.rank == 0 or not self.reads_on_rank_zero)
            self.engine = None

    def finish(self) -> None:
        """Drop what a training needed; after a failure too, when other ranks may be gone."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abandon()

    def accumulating(self) -> AbstractContextManager[Any]:
        """Surrounds the steps whose gradients need no exchange yet."""
        return contextlib.nullcontext()

    def exchange_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Average gradients that no backward pass has averaged.

        Ranks:
            Collective.
        """

    def rewrap(self) -> None:
        """Renew what stands before the module, after parameters were frozen or freed.

        Ranks:
            Collective.
        """


class SingleDevice(Strategy):
    """Trains on one device, in process."""

    name = "single_device"

    def connect(self, assignment: Assignment) -> Strategy:
        count = len(assignment.devices)
        if count != 1:
            raise ConfigurationError(
                f"strategy='single_device' has one device, but {count} were asked for. "
                "Write devices=1 (or one index, like devices=[0]), or strategy='ddp_spawn'."
            )
        return super().connect(assignment)
