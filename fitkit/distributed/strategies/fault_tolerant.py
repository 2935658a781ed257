"""Replicas that may die and come back while the others go on."""

from __future__ import annotations

import dataclasses
import os
import re
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.arguments import check_count, check_number, describe
from fitkit.distributed.assignment import Assignment
from fitkit.distributed.costs import Costs, Sizes, all_reduce, whole
from fitkit.distributed.engines.replica_group import ReplicaGroup, check_torchft
from fitkit.distributed.launch_variables import MOST_RANKS
from fitkit.distributed.strategies.base import Strategy, Training
from fitkit.errors import ArgumentTypeError, ConfigurationError, WorkerError

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
