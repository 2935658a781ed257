"""Manual optimization: updates by the model's own step (`automatic_optimization = False`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.data.batches import Batch
from fitkit.distributed.strategies import Engine, Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.fit_state import FitState
from fitkit.hooks import overridden
from fitkit.losses import Count
from fitkit.module import Module
from fitkit.trained import share
from fitkit.training.empty_parts import without_gradients_of_nothing
from fitkit.training.log import Logbook
from fitkit.training.step_for import Step
from fitkit.training.weighing import count_in, nothing_if, weighed


class Manual:
    """Runs a step that makes its own updates (`automatic_optimization = False`), and counts them.

    Each call of an optimizer's `step` is one. For optimizers that work otherwise (SAM's
    `first_step` and `second_step`), each batch that changes the weights is one.

    Args:
        model: the model whose optimizers make them.
        step: the object that calls its `training_step`.

    Attributes:
        backward: computes a loss's gradients, for the model's step.
    """

    def __init__(self, model: Module, step: Step) -> None:
        compilation = model._fitkit.compilation
        self._step = step
        self._state: FitState = model._fitkit.fit_state
        self._engine: Engine = compilation.strategy.engine or Engine()
        trained = compilation.trained(model)
        self._parameters = trained.parameters()
        self.backward: Callable[..., None] = partial(manual_backward, model, self._parameters)
        self._strategy = compilation.strategy
        is_alone = self._strategy.collectives.world_size == 1
        self._buffers_beside = [] if is_alone else trained.buffers_beside()
        self._steps_count = False  # whether a `step` was seen: then only these count
        self._updates_before: int | None = None  # of the epoch; None before its first batch
        self._has_warned = False

    def __call__(self, batch: Batch, index: int, record: Logbook) -> None:
        state, updates = self._state, self._state.updates
        if self._updates_before is None:
            self._updates_before = updates
        if self._buffers_beside:
            share(self._buffers_beside, self._strategy)
        versions = None if self._steps_count else self._versions()
        with state.counting_steps():
            self._step.record(batch, self._step(batch, index), record)
        if state.updates != updates:
            self._steps_count = True
        elif versions is not None and versions != self._versions():
            state.updates += 1
        for scaling in self._state.scalings:
            scaling.update()
        self._engine.after_update()

    def peekable(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    @property
    def is_between_updates(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing: no batch is held."""

    def finish(self) -> None:
        """Nothing is left over. Warns once of an epoch without an update."""
        if self._state.updates == self._updates_before and not self._has_warned:
            self._has_warned = True
            warn(
                "fitkit saw no update in this epoch, so global_step and all that counts updates, "
                "such as EMA, did not advance. It counts each optimizer.step() in training_step, "
                "and each batch that changes the parameters in place. It can't see changes "
                "through p.data."
            )
        self._updates_before = None

    def _versions(self) -> list[int]:
        """torch's counters of changes in place."""
        return [parameter._version for parameter in self._parameters]


def manual_backward(
    model: Module,
    parameters: list[torch.nn.Parameter],
    loss: torch.Tensor,
    count: Count = None,
    *,
    through: Callable[..., object] = torch.Tensor.backward,
    **options: Any,
) -> None:
    """Compute the gradients of a loss from the model's own step, averaged over the ranks.

    Args:
        through: what computes gradients, of the scaled loss and the options.
    """
    strategy, state = model._fitkit.compilation.strategy, model._fitkit.fit_state
    context: Any = model._fitkit.contexts.current
    ranks = strategy.data_ranks
    mine = count_in(context.batch, count)
    if ranks.world_size == 1:
        scaled = nothing_if(loss, mine)
    else:
        whole: float = context.batch.total
        if count is not None:
            mine = float(mine)
            (whole,) = ranks.sums([mine])
        scaled = weighed(loss, mine, ranks.world_size, whole)
    if state.scalings:
        scaled = state.scalings[0].scaler.scale(scaled)
    with without_gradients_of_nothing(loss, mine):
        through(scaled, **options)
    exchange_gradients(strategy, parameters)


def exchange_gradients(strategy: Strategy, parameters: list[torch.nn.Parameter]) -> None:
    """Average gradients over the ranks that no backward pass has averaged.

    Ranks:
        Collective.
    """
    if strategy.engine is None or not strategy.engine.average_gradients(parameters):
        strategy.mean_gradients(parameters)


def check_manual(model: Module) -> None:
    """Refuse options that a model with manual optimization can't have.

    Raises:
        ConfigurationError: no `training_step`, or options that belong to automatic optimization.
    """
    if not overridden(model, "training_step"):
        raise ConfigurationError(
            f"{type(model).__name__} has automatic_optimization = False, but no training_step to "
            "make the updates. Define training_step, or leave out automatic_optimization."
        )
    compilation = model._fitkit.compilation
    strategy = compilation.strategy
    if strategy.replicates:
        raise ConfigurationError(
            f"automatic_optimization = False doesn't work with strategy={strategy.name!r}: "
            "training_step runs once for each part of a batch, and each would make an update. "
            "Write strategy='ddp', or let fit make the updates."
        )
    given = compilation.given
    for name, value, default in (
        ("gradient_clip_val", given.gradient_clip_val, None),
        ("accumulate_grad_batches", given.accumulate_grad_batches, 1),
        ("effective_batch_size", given.effective_batch_size, None),
        ("warmup_epochs", given.warmup_epochs, 0),
    ):
        if value not in (None, default):
            raise ConfigurationError(
                f"{name}={describe(value)} has no effect with automatic_optimization = "
                "False, because training_step makes the updates. Do it there, and leave out "
                f"{name}."
            )
