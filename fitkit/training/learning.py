"""What a training batch leads to: one update, one by each optimizer, or what the model does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from fitkit.data.batches import NoRows
from fitkit.distributed.strategies import Engine
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import overridden, step_arguments
from fitkit.losses import Count
from fitkit.module import Module
from fitkit.training.compilation import DEFAULTS, Compilation
from fitkit.training.optimizing import FitState
from fitkit.training.stage import Stage
from fitkit.training.updates import Updater, nothing_if


class Learning(Protocol):
    """Learns from one batch after another."""

    def __call__(self, batch: Any, index: int) -> None: ...

    @property
    def is_between_groups(self) -> bool:
        """Whether no batch waits for others to make an update with it."""

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An epoch's batches, of which the learning may look at the next ones."""

    def finish(self) -> None:
        """Make the update of a group of batches that the epoch's end cuts short."""


class Upcoming:
    """Batches, of which the next ones can be looked at before they are taken."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._seen: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._batches)

    def peek(self, count: int) -> list[Any]:
        """The next `count` batches that have rows, or fewer where there aren't so many."""
        found = [batch for batch in self._seen if batch is not NoRows]
        while len(found) < count and (batch := next(self._batches, None)) is not None:
            self._seen.append(batch)
            found += [] if batch is NoRows else [batch]
        return found[:count]


class Automatic:
    """One optimizer's update from each batch (or group of batches).

    Args:
        step: computes the loss.
        updater: makes the update.
        alone: whether this is the only rank: a step may leave out a batch then.
    """

    def __init__(self, step: Any, updater: Updater, *, alone: bool) -> None:
        self._step = step
        self._updater = updater
        self._alone = alone
        self._upcoming = Upcoming(iter(()))
        self.finish = updater.finish

    @property
    def is_between_groups(self) -> bool:
        return self._updater.is_between_groups

    def __call__(self, batch: Any, index: int, **optimizer: int) -> None:
        step, updater = self._step, self._updater
        updater.clear()
        step.is_part = updater.sees_parts
        if updater.accumulates:
            with updater.around_step():
                self._learn(step(batch, index, **optimizer))
        elif updater.takes_closure:
            loss = step(batch, index, **optimizer)
            if loss is None:
                self._learn(None)
                return
            again = partial(step.again, batch, index, **optimizer)
            updater.step_with_closure(loss, again, step.samples, step.total, step.count)
        else:
            self._learn(step(batch, index, **optimizer))

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An epoch's batches, of which the next ones can be looked at."""
        if not self._step.may_count:
            return batches
        self._upcoming = Upcoming(batches)
        return self._upcoming

    def share(self, other: Automatic) -> None:
        """Look at the same next batches as another learner."""
        self._upcoming = other._upcoming

    def _ahead(self, batches: int) -> list[list[float]]:
        return [self._step.counts_of(batch) for batch in self._upcoming.peek(batches)]

    def _learn(self, loss: torch.Tensor | None) -> None:
        step = self._step
        if loss is not None:
            if step.terms is None:
                self._updater.step(loss, step.samples, step.total, step.count)
            else:
                self._updater.step_terms(step.terms, step.samples, step.total, self._ahead)
        elif not self._alone:
            raise ConfigurationError(
                "training_step returned None, to leave out a batch. Several ranks make each step "
                "together: return a loss of 0 * (the sum of the net's outputs) instead."
            )


class Alternating:
    """Several optimizers: each batch is for each of them in turn, or for the one whose turn it is.

    While an optimizer's step runs, only its own parameters need gradients.

    Args:
        step: computes the loss for an optimizer's number.
        updaters: one an optimizer.
        state: holds the optimizers, and for how many batches in a row each is used.
        alone: as in `Automatic`.
    """

    def __init__(self, step: Any, updaters: list[Updater], state: FitState, *, alone: bool) -> None:
        self._learners = [Automatic(step, updater, alone=alone) for updater in updaters]
        self._optimizers = [updater.optimizer for updater in updaters]
        self._state = state
        turns = state.frequencies or []
        self._turns = [number for number, count in enumerate(turns) for _ in range(count)]

    def __call__(self, batch: Any, index: int) -> None:
        numbers = range(len(self._learners))
        if self._turns:
            turn = self._turns[index % len(self._turns)]
            numbers = range(turn, turn + 1)
        for number in numbers:
            with only_for(self._optimizers[number], self._state):
                self._learners[number](batch, index, optimizer_idx=number)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        first, *others = self._learners
        batches = first.watch(batches)
        for learner in others:
            learner.share(first)
        return batches

    @property
    def is_between_groups(self) -> bool:
        return all(learner.is_between_groups for learner in self._learners)

    def finish(self) -> None:
        for learner in self._learners:
            learner.finish()


class Manual:
    """The step makes the updates itself (`automatic_optimization = False`); they are counted.

    Each call of an optimizer's `step` is one. Optimizers that work otherwise (SAM's `first_step`
    and `second_step`) have made one in each batch after which the weights have changed.

    Args:
        step: calls the model's `training_step`.
        state: holds the optimizers, and counts the updates.
        engine: acts after each step; None where nobody does.
        parameters: all that may learn.
    """

    def __init__(
        self,
        step: Any,
        state: FitState,
        engine: Engine | None,
        parameters: list[torch.nn.Parameter],
    ) -> None:
        self._step = step
        self._state = state
        self._engine = engine
        self._parameters = parameters
        self._steps_count = False  # whether some `step` was seen: then nothing else is looked at
        self._updates_before: int | None = None  # of the epoch; None before its first batch
        self._has_warned = False

    def __call__(self, batch: Any, index: int) -> None:
        state, updates = self._state, self._state.updates
        if self._updates_before is None:
            self._updates_before = updates
        versions = None if self._steps_count else self._versions()
        with state.counting_steps():
            self._step(batch, index)
        if state.updates != updates:
            self._steps_count = True
        elif versions is not None and versions != self._versions():
            state.updates += 1
        for scaling in self._state.scalings:
            scaling.update()
        if self._engine is not None:
            self._engine.after_update()

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    @property
    def is_between_groups(self) -> bool:
        return True

    def finish(self) -> None:
        """Nothing is left over; an epoch without an update is told once."""
        if self._state.updates == self._updates_before and not self._has_warned:
            self._has_warned = True
            warn(
                "No update was seen in this epoch, so global_step, EMA and what else follows "
                "updates stand still. One is counted for each optimizer.step() in training_step, "
                "or for a batch that changes the parameters in place; p.data hides a change."
            )
        self._updates_before = None

    def _versions(self) -> list[int]:
        """What torch counts up with each change in place."""
        return [parameter._version for parameter in self._parameters]


@contextmanager
def only_for(optimizer: Optimizer, state: FitState) -> Iterator[None]:
    """Let only an optimizer's own parameters need gradients."""
    frozen = state.freeze_others(optimizer)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def learning_for(
    model: Module,
    compilation: Compilation,
    stage: Stage,
    step: Any,
    updaters: list[Updater],
) -> Learning:
    """What a batch leads to, by the model's optimizers.

    Args:
        stage: the training; manual optimization computes gradients by it.
        step: computes losses.
        updaters: one an optimizer.
    """
    strategy, state = compilation.strategy, model._fitkit.fit_state
    if not model.automatic_optimization:
        check_manual(model, compilation)
        parameters = compilation.trainable(model)

        def backward(loss: torch.Tensor, count: Count = None, **options: Any) -> None:
            mine, whole = step.samples, step.total
            if count is not None and strategy.shares.world_size > 1:
                mine = float(count)
                (whole,) = strategy.shares.sums([mine])
            share = mine * strategy.shares.world_size
            scaled = loss if share == whole else nothing_if(loss, mine) * (share / whole)
            if state.scalings:
                scaled = state.scalings[0].scaler.scale(scaled)
            scaled.backward(**options)
            strategy.exchange_gradients(parameters)

        stage.backward = backward
        return Manual(step, state, strategy.engine, parameters)
    alone = strategy.collectives.world_size == 1
    takes_turns = "optimizer_idx" in step_arguments(model, "training_step")
    if len(updaters) > 1 and overridden(model, "training_step") and not takes_turns:
        raise ConfigurationError(
            f"configure_optimizers returned {len(updaters)} optimizers, but training_step doesn't "
            "ask whose turn it is. Write def training_step(self, batch, batch_idx, optimizer_idx), "
            "or set automatic_optimization = False and step in it."
        )
    if len(updaters) == 1:
        return Automatic(step, updaters[0], alone=alone)
    return Alternating(step, updaters, state, alone=alone)


def check_manual(model: Module, compilation: Compilation) -> None:
    """Refuse what a model that makes its own updates can't be asked for.

    Raises:
        ConfigurationError: no `training_step`, or options that belong to automatic optimization.
    """
    if not overridden(model, "training_step"):
        raise ConfigurationError(
            f"{type(model).__name__} has automatic_optimization = False, but no training_step, so "
            "nobody makes the updates. Define it, or leave automatic_optimization out."
        )
    strategy = compilation.strategy
    if strategy.replicates:
        raise ConfigurationError(
            f"automatic_optimization = False can't be kept under strategy={strategy.name!r}: "
            "training_step runs once for each part of a batch, and each would make an update. "
            "Write strategy='ddp', or let fit make the updates."
        )
    for name in ("gradient_clip_val", "accumulate_grad_batches", "warmup_epochs"):
        if compilation.given[name] not in (None, 0, DEFAULTS[name]):
            raise ConfigurationError(
                f"{name}={compilation.given[name]!r} can't be kept with automatic_optimization = "
                "False: the updates are made in training_step. Do it there."
            )
