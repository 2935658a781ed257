"""What a strategy decides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fitkit.distributed.cluster import Cluster, check_agreement, check_one_process
from fitkit.distributed.collectives import Collectives, Solo
from fitkit.distributed.costs import Costs, Sizes, whole
from fitkit.distributed.launchers import InlineLauncher, Launcher
from fitkit.distributed.meta_tensors import fill_meta
from fitkit.distributed.precision import FullPrecision, Precision
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import Door
from fitkit.errors import ConfigurationError


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
        may_count: whether a training's losses may be means over something else than samples: set
            before its door is asked for.
    """

    name = ""
    starts = "here"
    """How the ranks come to be where no launcher started them: `"here"` (there is one, the
    caller's process), `"workers"` (worker processes) or `"script"` (the script again)."""
    replicates = False
    """Whether a process can have several devices, with a replica of the module on each."""
    kinds: tuple[str, ...] = ("cpu", "cuda", "mps")
    """The kinds of devices that it can use."""
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
        self.may_count = False

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

    def device_count(self) -> int | None:
        """How many devices this machine has of a kind that only this strategy knows; else None."""
        return None

    def check_launch(self, cluster: Cluster, devices: int | None, num_nodes: int | None) -> None:
        """Refuse other processes than this strategy needs.

        Args:
            cluster: what a launcher started.
            devices: as asked for each node; None for as many as there are.
            num_nodes: as asked; None for as many as there are.

        Raises:
            ConfigurationError: what was started and what was asked differ.
        """
        if self.starts == "here":
            check_one_process(cluster, self.name)
            check_agreement(cluster, 1, num_nodes)
        else:
            check_agreement(cluster, devices, num_nodes)

    @property
    def shares(self) -> Collectives:
        """By which data are dealt out and logs reduced: ranks that differ in what they see."""
        return self.collectives

    @property
    def share_count(self) -> int:
        """How many shares the data are dealt into, outside of a run too."""
        return self.world.size

    @property
    def replicas(self) -> int:
        """How many replicas of the module compute parts of a batch in this process."""
        return 1

    @property
    def evaluates_in_step(self) -> bool:
        """Whether a rank's forward waits for the others' now, so that all make equally many."""
        return False

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.devices[min(self.world.local_rank, len(self.devices) - 1)]

    def costs(self, module: torch.nn.Module, sizes: Sizes, devices: int, nodes: int) -> Costs:
        """What each device would hold, and each rank send, before any of them is there.

        Args:
            module: the net.
            sizes: of a training of the whole net.
            devices: on each node.
            nodes: how many machines.
        """
        return whole(sizes)

    def join(self, store: Store | None = None) -> None:
        """Enter the ranks' process group, where there are several.

        Ranks:
            Collective.
        """

    def leave(self) -> None:
        """Leave it."""

    def place(self, module: torch.nn.Module) -> None:
        """Bring the module to this rank's device, with rank 0's numbers."""
        self.precision.convert(module)
        fill_meta(module)
        module.to(self.device)

    def place_for_training(self, module: torch.nn.Module) -> None:
        """As `place`, before a training; one that `begin_training` spreads may come there in
        parts."""
        self.place(module)

    def door(self, module: torch.nn.Module) -> Door:
        """The way into the module for training steps."""
        return self.plain_door(module)

    def evaluation_door(self, module: torch.nn.Module) -> Door:
        """The way in for evaluation and prediction: no rank waits in it for another share's."""
        return self.plain_door(module)

    def plain_door(self, module: torch.nn.Module) -> Door:
        """The way in for training steps whose gradients `exchange_gradients` averages."""
        return Door(module)

    @property
    def count_carrier(self) -> torch.nn.Parameter | None:
        """A parameter () whose gradient is averaged over the ranks together with the module's, as
        it is and exactly; None where there is none. What counts on each rank travels as that."""
        return None

    def rewrap(self) -> None:
        """Renew what stands before the training door, after parameters were frozen or freed.

        Ranks:
            Collective.
        """

    def begin_training(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Take what learns, and what makes the updates, before a training's first step.

        Ranks:
            Collective.

        Raises:
            ConfigurationError: a module or an optimizer that this strategy can't train.
        """

    def end_training(self) -> None:
        """Give both back as they were but for what they learned; not called after a failure.

        Ranks:
            Collective.
        """

    def for_file(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, with whole tensors on rank 0, which writes them to a file.

        Ranks:
            Collective within a run.
        """
        return make()

    def for_folder(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, for a folder to which every rank writes its part: spread tensors
        stay spread.

        Ranks:
            Collective within a run.
        """
        return make()

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

    def scale_gradients(self, parameters: list[torch.nn.Parameter], factor: Any) -> None:
        """Multiply the gradients of an update that is about to be made.

        Args:
            factor: a number, or a tensor () on the device.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_gradients(
        self, parameters: list[torch.nn.Parameter], limit: float, algorithm: str
    ) -> None:
        """Limit the gradients of an update that is about to be made.

        Args:
            limit: of their norm or values.
            algorithm: `"norm"` (of all gradients together) or `"value"` (each entry).
        """
        if algorithm == "norm":
            clip_grad_norm_(parameters, limit)
        else:
            clip_grad_value_(parameters, limit)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's step.

        Ranks:
            Collective where an engine makes it.
        """
        optimizer.step()

    def after_update(self) -> None:
        """Act after each update of the weights; called where a strategy overrides it.

        Ranks:
            Collective.
        """

    def settle(self) -> None:
        """Make one again what the ranks of a training hold apart, if anything: at epochs' ends,
        before evaluations and before saves.

        Ranks:
            Collective.
        """

    def finish(self) -> None:
        """Drop what a training needed; after a failure too, when other ranks may be gone."""


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
