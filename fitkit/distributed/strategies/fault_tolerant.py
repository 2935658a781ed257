"""Replicas that may die and come back while the others go on."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from fitkit.arguments import check_count, check_number, describe
from fitkit.distributed.assignment import Assignment
from fitkit.distributed.cluster import MOST_RANKS
from fitkit.distributed.costs import Costs, Sizes, all_reduce, whole
from fitkit.distributed.strategies.base import Strategy, Training
from fitkit.errors import ArgumentTypeError, ConfigurationError, WorkerError, missing_package, warn

HOW = (
    "Start torchft_lighthouse --min_replicas 1 once, and the script once for each replica with "
    "TORCHFT_LIGHTHOUSE=http://<host>:29510, NUM_REPLICA_GROUPS=<how many> and "
    "REPLICA_GROUP_ID=<0, 1, …> in the environment."
)


class FaultTolerant(Strategy):
    """Replicas that may die and come back; the others go on without a restart (torchft).

    Each replica is a process of its own with one device, which someone starts and, when it has
    died, starts again. `NUM_REPLICA_GROUPS` says how many there are and `REPLICA_GROUP_ID` which
    one a process is. Each sees its share of the training data; gradients are averaged over those
    that live. One that joins takes weights, optimizers, schedulers, counters and the place in the
    data over from another. Every replica evaluates and predicts the whole data by itself.

    Without the two variables there is one replica, and the training is an ordinary one.

    Args:
        lighthouse: the address of torchft's lighthouse, like `"http://host:29510"`; None for the
            variable `TORCHFT_LIGHTHOUSE`.
        min_replicas: fewer living replicas make no update, but wait for others.
        timeout: seconds that an exchange may take, before whoever is missing counts as lost.
        patience: seconds to wait for `min_replicas`, and for a replica that is busy.

    Reference: torchft, https://github.com/meta-pytorch/torchft
    """

    name = "fault_tolerant"

    def __init__(
        self,
        lighthouse: str | None = None,
        min_replicas: int = 1,
        timeout: float = 60.0,
        *,
        patience: float = 1800.0,
    ) -> None:
        super().__init__()
        if not (lighthouse is None or isinstance(lighthouse, str)):
            raise ArgumentTypeError(
                f"lighthouse={describe(lighthouse)} must be an address like "
                "'http://host:29510', or None."
            )
        check_count("min_replicas", min_replicas)
        check_number("timeout", timeout, above=0)
        check_number("patience", patience, above=0)
        self.lighthouse = lighthouse
        self.min_replicas = min_replicas
        self.limits = timedelta(seconds=timeout), timedelta(seconds=patience)
        self._part = (0, 1)
        self._group: ReplicaGroup | None = None
        self._training: Training | None = None
        self._module: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._attempts = 0  # at updates, by all replicas since the training began
        self._is_joining = False
        self._contributors: int | None = None  # to the update that is being made; None before

    # ------------------------------------------------------------------ who takes part

    def connect(self, assignment: Assignment) -> Strategy:
        check_torchft()
        count, precision = len(assignment.devices), assignment.precision
        if count != 1:
            raise ConfigurationError(
                f"strategy='fault_tolerant' has one device in a process, but {count} were "
                f"asked for. {HOW}"
            )
        if precision.name in ("16-mixed", "16-true"):
            raise ConfigurationError(
                f"precision={precision.name!r} can't be kept under strategy='fault_tolerant', "
                "which averages unscaled gradients. Write 'bf16-mixed' or '32-true'."
            )
        self._part = _part_in(os.environ)
        if self._part[1] > 1 and self._address() is None:
            raise ConfigurationError(
                f"NUM_REPLICA_GROUPS={self._part[1]}, but nobody says where the lighthouse is. "
                + HOW
            )
        if self.min_replicas > self._part[1] > 1:
            raise ConfigurationError(
                f"min_replicas={self.min_replicas} is more than NUM_REPLICA_GROUPS="
                f"{self._part[1]}: no update would ever be made."
            )
        return super().connect(assignment)

    def _address(self) -> str | None:
        return self.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE") or None

    @property
    def part(self) -> tuple[int, int]:
        return self._part

    @property
    def share_count(self) -> int:
        return self._part[1]

    def costs(self, module: nn.Module, sizes: Sizes, devices: int, nodes: int) -> Costs:
        replicas = devices * nodes
        return dataclasses.replace(
            whole(sizes),
            exchange=2 * sizes.gradients if replicas > 1 else 0.0,
            sent=all_reduce(sizes.gradients, replicas),
        )

    # ------------------------------------------------------------------ a training

    def begin_training(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self._part[1] == 1:
            return
        _check_trains(module, optimizers)
        self._module = module
        self._parameters = [p for group in optimizers[0].param_groups for p in group["params"]]

    def meet(self, training: Training) -> None:
        address = self._address()
        assert address is not None, "connect has looked"
        self._training = training
        self._attempts, self._is_joining, self._contributors = 0, True, None
        number, replicas = self._part
        self._group = ReplicaGroup(
            number,
            replicas,
            address,
            self.min_replicas,
            *self.limits,
            self.device,
            self._give,
            self._take,
        )
        while self._is_joining:
            self._average(contributes=False)
            if self._contributors:
                # The others make an update: this replica makes it with them, from their weights.
                training.follow()
            else:
                self._is_joining = not self._group.commits()
                self._contributors = None

    def _give(self) -> Any:
        """This replica's state at the present update, for one that joins."""
        assert self._training is not None
        return {
            "attempts": self._attempts,
            "trains": not self._is_joining,
            "training": self._training.give(moved=not self._is_joining),
        }

    def _take(self, state: Any) -> None:
        """Take over another replica's state at the present update."""
        assert self._training is not None
        if not self._is_joining and state["attempts"] != self._attempts:
            raise WorkerError(
                f"This replica has seen {self._attempts} updates, the others "
                f"{state['attempts']}: it was busy for longer than the lighthouse waits "
                "(--join_timeout_ms). Start it again, and it joins them."
            )
        self._attempts = state["attempts"]
        self._training.take(state["training"], moves=self._is_joining and state["trains"])

    def end_training(self) -> None:
        group = self._group
        if group is None:
            return
        # Whoever has missed the last update gets the weights, and nobody leaves amid an exchange.
        self._average(contributes=False)
        group.commits()
        self._group = None
        group.leave(wait=True)

    def finish(self) -> None:
        group, self._group = self._group, None
        self._training = self._module = None
        self._parameters = []
        if group is not None:
            group.leave(wait=False)

    # ------------------------------------------------------------------ an update

    def _average(self, *, contributes: bool = True) -> None:
        """Average the present update's gradients over the replicas, once."""
        if self._group is not None and self._contributors is None:
            assert self._module is not None
            self._contributors = self._group.average(
                self._learning(), self._module, contributes=contributes
            )

    def _learning(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def clip_gradients(self, parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
        self._average()
        super().clip_gradients(parameters, limit, algorithm)

    def update(self, optimizer: Optimizer) -> None:
        if self._group is None:
            super().update(optimizer)
            return
        self._average()
        contributors, self._contributors = self._contributors, None
        if self._group.commits():
            self._is_joining = False
            if contributors:
                super().update(optimizer)
        self._attempts += 1


def _part_in(variables: Any) -> tuple[int, int]:
    """Which replica this process is, of how many.

    Raises:
        ConfigurationError: one of the variables is missing, or no number that makes sense.
    """
    names = ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS")
    words = [str(variables.get(name, "")).strip() for name in names]
    if not any(words):
        return 0, 1
    numbers = [int(word) for word in words if re.fullmatch("[0-9]{1,9}", word)]
    if len(numbers) < 2 or not numbers[0] < numbers[1] <= MOST_RANKS:
        shown = ", ".join(f"{name}={word!r}" for name, word in zip(names, words, strict=True))
        raise ConfigurationError(
            f"{shown}: the first is a replica's number from 0, the second how many there are. {HOW}"
        )
    return numbers[0], numbers[1]


def _check_trains(module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Refuse updates that the replicas can't make together.

    Raises:
        ConfigurationError: with what to write instead.
    """
    reason = ""
    if not getattr(module, "automatic_optimization", True):
        reason = "automatic_optimization = False"
    elif len(optimizers) != 1:
        reason = f"{len(optimizers)} optimizers"
    elif isinstance(optimizers[0], torch.optim.LBFGS):
        reason = "LBFGS, which computes the loss several times a step,"
    if reason:
        raise ConfigurationError(
            f"{reason} can't be kept under strategy='fault_tolerant': each batch must lead to one "
            "update. Take one other optimizer and automatic optimization, or strategy='ddp'."
        )


RETRIES = 50
"""Updates in a row that may fail before a replica gives up."""


def check_torchft() -> None:
    """Make sure that the package is there.

    Raises:
        MissingPackageError: it isn't.
    """
    if "torchft" not in sys.modules and importlib.util.find_spec("torchft") is None:
        raise missing_package("torchft", "fault-tolerant", "strategy='fault_tolerant'")


class ReplicaGroup:
    """This replica among those that live, until `leave`.

    Args:
        number: of this replica, from 0.
        replicas: how many there are when all live.
        lighthouse: the address of torchft's lighthouse.
        min_replicas: fewer than so many make no update.
        timeout: of an exchange.
        patience: how long to wait for enough replicas.
        device: of the module.
        give: gives a replica's whole state, for one that joins.
        take: takes another's over.
    """

    def __init__(
        self,
        number: int,
        replicas: int,
        lighthouse: str,
        min_replicas: int,
        timeout: timedelta,
        patience: timedelta,
        device: torch.device,
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        check_torchft()
        os.environ.setdefault("RUST_LOG", "error")  # else several lines for each update
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        for name in ("torchft", "torchft.manager"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `commits` tells what went wrong
        self._replicas = replicas
        host = socket.gethostname()
        # Where the others learn how to reach this replica; it needs no one's leave to come or go.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        kind = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
        self._group = kind(timeout=timeout)
        self._manager = Manager(
            pg=self._group,
            load_state_dict=take,
            state_dict=give,
            min_replica_size=min_replicas,
            timeout=timeout,
            quorum_timeout=patience,
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{number}",
            hostname=host,
            max_retries=RETRIES,
        )

    @torch.no_grad()
    def average(
        self, parameters: list[nn.Parameter], module: nn.Module, *, contributes: bool
    ) -> int:
        """Replace gradients, and batch norms' running statistics, by the mean over the replicas.

        A parameter that a replica didn't use counts as zero there; one that nobody used keeps no
        gradient.

        Args:
            parameters: that learn, the same on every replica.
            module: whose running statistics they are.
            contributes: whether this replica has gradients to give.

        Returns:
            How many replicas have contributed; 0 where nothing came of it.

        Ranks:
            Collective among the replicas that live.
        """
        self._manager.start_quorum()
        statistics = running_statistics(module)
        tensors = [_gradient(p) for p in parameters] + statistics
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        told = [float(p.grad is not None) for p in parameters] + [1.0]
        flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
        packed = torch.cat([*flat, flat[0].new_tensor(told)])
        if not contributes:
            packed.zero_()
        self._manager.allreduce(packed, reduce_op=ReduceOp.SUM).wait()
        *parts, used = packed.split([*(tensor.numel() for tensor in tensors), len(told)])
        *users, count = used.tolist()
        if self._manager.errored() or not count:
            return 0
        for parameter, part, some in zip(parameters, parts, users, strict=False):
            if some:
                # Each has given its samples' part of the mean over all that there could be.
                mean = part.view_as(parameter).mul_(self._replicas / count)
                # Laid out as the weights are: a fused step reads both in the same order.
                parameter.grad = torch.empty_like(parameter).copy_(mean)
        for statistic, part in zip(statistics, parts[len(parameters) :], strict=True):
            statistic.copy_(part.view_as(statistic).div_(count))
        return round(count)

    def commits(self) -> bool:
        """Whether this replica makes the update; one that joins takes over a state before it."""
        commits: bool = self._manager.should_commit()
        if not commits:
            error = self._manager.errored()
            reason = str(error.original_exception).splitlines()[0] if error else "too few replicas"
            warn(f"An update is left out, because an exchange between replicas failed: {reason}")
        return commits

    def leave(self, *, wait: bool) -> None:
        """Leave the others.

        Args:
            wait: whether for this replica's own threads; not after a failure.
        """
        self._manager.shutdown(wait=wait)
        self._group.shutdown()


def running_statistics(module: nn.Module) -> list[torch.Tensor]:
    """Batch norms' running means and variances."""
    return [
        statistic
        for child in module.modules()
        if isinstance(child, _NormBase)
        for statistic in (child.running_mean, child.running_var)
        if statistic is not None
    ]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient; zeros where it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
