"""Strategy: the base class of all strategies, and training on one device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit.accelerators import move
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
    """The hardware that `compile`'s arguments select in this process.

    Attributes:
        devices: the devices of this node's ranks, in rank order.
        ids: their indices.
        precision: the run's precision.
        cluster: this process's place among the ranks that a launcher started. None if the strategy
            starts them itself.
    """

    devices: tuple[torch.device, ...]
    ids: tuple[int, ...]
    precision: Precision
    cluster: Cluster | None = None


class Strategy:
    """Decides where a module is, which processes compute, and how the ranks stay in step.

    The training loops ask a strategy for what they need, and never check which one it is. The base
    class is right for one device. A subclass overrides what differs. An `Engine` can compute the
    gradients and updates of a training; return it from `engine_for`.

    A subclass sets `name`, `starts`, `replicates`, `most_devices`, `ranks_per_batch` and
    `has_engine`. The other attributes are set on the object during a run.

    Attributes:
        devices, device_ids, precision: set by `connect`: the devices of this node's ranks, in rank
            order; their indices; the run's precision.
        world, launcher, reads_on_rank_zero: set by `connect` if there may be several ranks. `world`
            is this process's place among them, and `launcher` brings them into a call.
            `reads_on_rank_zero` says whether only rank 0 has the user's iterables, and sends
            batches to the others.
        collectives: set by `join` and `leave`: the exchanges between the ranks.
        engine: the result of `engine_for`, from `begin_engine` to `end_engine`. None outside of a
            training, and if torch computes gradients and updates.

    Example:
        >>> from fitkit.strategies import DDPStrategy, Strategy
        >>> issubclass(DDPStrategy, Strategy)
        True
    """

    name = ""
    """The name that users write."""
    starts = "here"
    """How the ranks start if no launcher started them: `"here"` (a single rank, the caller's
    process), `"workers"` (worker processes) or `"script"` (the script runs again for each).
    `"nodes"` is like `"here"`, but launchers may start one process on each node."""
    replicates = False
    """Whether a process can use several devices, with a replica of the module on each."""
    most_devices: int | None = None
    """How many devices it can use, which `devices="auto"` then means. None for any number."""
    ranks_per_batch: int = 1
    """How many neighbouring ranks compute each batch together. The other ranks see other data."""
    has_engine = False
    """Whether a training may have an engine, which then decides how weights are stored."""

    cuts_batches = False
    """Whether a rank may compute its batch in parts: nothing is exchanged within a batch then."""

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.device_ids: tuple[int, ...] = (0,)
        self.precision: Precision = FullPrecision()
        self.world: World = World()
        self.collectives: Collectives = Solo()
        self.launcher: Launcher = InlineLauncher()
        self.reads_on_rank_zero = False
        self.engine: Engine | None = None
        self._trainings = 0  # that go on, one within another

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied, and sent to other ranks. An override leaves out what can't be."""
        return dict(vars(self))

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        """Return what other ranks get: everything but this process's launcher.

        A strategy is sent between calls, when it has neither a group nor a training.
        """
        return {**self.__getstate__(), "launcher": InlineLauncher()}

    @final
    def for_model(self) -> Strategy:
        """Return a strategy of a model's own, with the options of this one, which only describes.

        So one object serves several models. What the object refers to stays shared, also what
        can't be copied.
        """
        own = object.__new__(type(self))
        vars(own).update(vars(self))
        return own

    # ------------------------------------------------------------------ devices and ranks

    def choose_kind(self, accelerator: Any, machine: Machine) -> tuple[str, Machine]:
        """Resolve `accelerator` to a kind of device, and to the machine with its device count.

        Raises:
            ConfigurationError: the machine has no such device, or this strategy can't use it.
        """
        kind = choose_kind(accelerator, machine)
        if kind == "xla":
            raise ConfigurationError(
                f"strategy={self.name!r} can't use xla devices, which accelerator="
                f"{accelerator!r} means here. Write strategy='xla', or leave one of the two out."
            )
        return kind, machine

    def connect(self, assignment: Assignment) -> Strategy:
        """Store the devices of this run. Returns the strategy itself.

        Raises:
            ConfigurationError: this strategy can't use the devices.
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
        """Enter the ranks' process group, if there are several ranks.

        Ranks:
            Collective.
        """

    def leave(self) -> None:
        """Leave the process group."""

    # ------------------------------------------------------------------ the module

    def place(self, module: torch.nn.Module, *, for_training: bool = False) -> None:
        """Move the module to this rank's device, with rank 0's weights.

        Args:
            for_training: whether a training follows. If so, a module that its engine will shard
                may arrive on the device in parts.
        """
        self.precision.convert(module)
        tensors = tensors_of(module)
        if not tensors or any(tensor.device != self.device for tensor in tensors):
            fill_meta(module)
            move(module, self.device)

    def wrap_for_training(
        self,
        module: torch.nn.Module,
        *,
        averages: bool = True,
        may_count: bool = False,
        compiles: bool = False,
        apart: bool = False,
    ) -> WrappedModel:
        """Return the model as training steps call it.

        Args:
            averages: whether each backward pass averages its gradients over the ranks. If not, the
                loop does it before an update.
            may_count: whether losses may be means over something other than samples.
            compiles: whether a step is compiled as a whole if nothing acts within it. The loop then
                averages all gradients in one exchange, and `shared_buffers` of the result says so.
            apart: whether the loop must do so, because ranks compute their batches in parts.

        Ranks:
            Collective.
        """
        return self.wrap_for_evaluation(module)

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        """Return the model as evaluation and prediction call it. No rank waits for another in it,
        unless `evaluates_in_step` says so."""
        if self.engine is not None and self.engine.evaluates_in_step:
            return self.engine.wrap(module)
        return WrappedModel(module)

    # ------------------------------------------------------------------ a training

    def engine_for(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        """Return the engine that computes gradients and updates. None: torch computes them.

        Ranks:
            Collective.

        Raises:
            ConfigurationError: this strategy can't train the module or the optimizer.
        """
        return None

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replace gradients by their mean over the ranks, where no wrapper or engine does so.

        Ranks:
            Collective.
        """
        self.collectives.mean_gradients(parameters)

    def after_first_batch(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        """Make equal on all ranks what the module's first forward has set on each.

        Args:
            optimizers: of the module's parameters.

        Ranks:
            Collective.
        """

    def finish(self) -> None:
        """Release what a training needed. Also called after a failure, if other ranks are gone."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abandon()

    @final
    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """Surround a training. Whatever ends it, the strategy has nothing of it afterwards.

        A callback may train the model meanwhile. That belongs to the outer training: it uses the
        same engine and wrapper, and leaves both to it.
        """
        self._trainings += 1
        try:
            yield
        finally:
            self._trainings -= 1
            if not self._trainings:
                self.finish()

    @final
    def begin_engine(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        """Begin the engine of a training, if the strategy has one.

        Ranks:
            Collective.
        """
        if self._trainings == 1:
            self.engine = self.engine_for(module, optimizers)

    @final
    def end_engine(self, *, wanted: bool) -> None:
        """Have the engine give back the module and the optimizers. Not called after a failure.

        Args:
            wanted: whether this rank needs what was learned.

        Ranks:
            Collective.
        """
        if self._trainings == 1 and self.engine is not None:
            self.engine.end(wanted=wanted)
            self.engine = None

    # ------------------------------------------------------------------ what follows from these

    @final
    @property
    def replicas(self) -> int:
        """How many replicas of the module compute parts of a batch in this process."""
        return len(self.devices) if self.replicates else 1

    @final
    @property
    def data_ranks(self) -> Collectives:
        """The ranks that see different data. Data are divided over them."""
        size, together = self.collectives.world_size, self.ranks_per_batch
        if size == 1 or together == 1:
            return self.collectives
        groups = [list(range(first, first + together)) for first in range(0, size, together)]
        return NodeShares(self.collectives, groups)

    @property
    def log_ranks(self) -> Collectives:
        """The ranks that have computed different values. Logs and metrics are reduced over them."""
        return self.data_ranks

    @final
    @property
    def data_rank_count(self) -> int:
        """The number of shares that the data are divided into, outside of a run as well."""
        return self.world.size // self.ranks_per_batch

    @property
    def evaluates_in_step(self) -> bool:
        """Whether a rank's forward waits for the other ranks, so that all must call it equally
        often."""
        return self.engine is not None and self.engine.evaluates_in_step


class SingleDevice(Strategy):
    """Trains on one device, in process.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", strategy=fitkit.strategies.SingleDeviceStrategy())
    """

    name = "single_device"
    most_devices: int | None = 1
    cuts_batches = True

    def connect(self, assignment: Assignment) -> Strategy:
        count = len(assignment.devices)
        if count != 1:
            raise ConfigurationError(
                f"strategy='single_device' has one device, but {count} were asked for. "
                "Write devices=1 (or one index, like devices=[0]), or strategy='ddp_spawn'."
            )
        return super().connect(assignment)
