"""What a fit learns by: its step, its updates, and the rates that they move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.optim import Optimizer

from fitkit.arguments import chosen_verbose
from fitkit.data.batches import Batch, Source
from fitkit.distributed.strategies import Strategy
from fitkit.module import Module
from fitkit.optimizers import warn_of_flags
from fitkit.scopes import Scope
from fitkit.training import unsaved
from fitkit.training.batch_changes import BatchChanges, batch_transforms_of
from fitkit.training.compiler import Updates, compiler_of
from fitkit.training.epoch_lengths import EpochLengths
from fitkit.training.fit_data import FitData
from fitkit.training.log import Logbook
from fitkit.training.rates import Rates
from fitkit.training.settings import FitArguments
from fitkit.training.step_context import StepContext
from fitkit.training.step_for import Step, new_context, step_for
from fitkit.training.update import Learning, backward_of, updates_for
from fitkit.typing import PlainData

BEFORE = "updates before"
"""The name in a checkpoint of the updates before the training, by which batch transforms draw."""


class FitLearning:
    """How one call of `fit` turns batches into updates. It is made once the net is on its device.

    Args:
        model: the model to train.
        arguments: the arguments of `fit`.
        data: what the fit reads.
        held_out: this rank's share of the validation sets.
        scope: the call's.

    Attributes:
        optimizers: those of the model.
        accumulate: the batches of an update, if no callback says so.
        group: the batches between two calls of the hooks at batches.
        step: computes a batch.
        changes: change whole batches before their step; None if nothing does.
        rates: move after updates and epochs.
        update: makes the updates.
    """

    def __init__(
        self,
        model: Module,
        arguments: FitArguments,
        data: FitData,
        held_out: list[Source],
        scope: Scope,
    ) -> None:
        compilation, callbacks = model._fitkit.compilation, arguments.callback_list
        strategy: Strategy = compilation.strategy
        self._model, self._strategy = model, strategy
        self.optimizers: list[Optimizer] = model._made_optimizers()
        self.accumulate: int = arguments.accumulate or compilation.given.accumulate_grad_batches
        self.group: int = callbacks.batches_between_hooks(compilation.given.steps_per_execution)
        unsaved.note(model)
        warn_of_flags(model)
        strategy.begin_engine(model, self.optimizers)
        self.step: Step = _step(model, arguments, data.source, held_out)
        self.changes: BatchChanges | None = batch_transforms_of(
            model, self.step, callbacks.callbacks, key=data.draws.key
        )
        resumed = arguments.resumed
        if self.changes is not None and resumed is not None:
            self.changes.first = resumed.data.get(BEFORE, self.changes.first)
        self.step.mover.bring_whole(data.source)
        self.rates: Rates = _rates(model, arguments, data, self.accumulate, scope)
        self.update: Updates = updates_for(
            model, self.step, accumulate=self.accumulate, rates=self.rates
        )
        self._backward = backward_of(self.update)
        is_speaking = strategy.collectives.rank == 0 and chosen_verbose(arguments.verbose) != 0
        if (compiler := compiler_of(model)) is not None:
            self.update = compiler.updates(
                model,
                self.update,
                joins_steps=self.group > 1 and not self.rates.read_steps,
                is_announced=is_speaking,
            )
        self._learns = self._which_learn()

    @property
    def is_between_updates(self) -> bool:
        """Whether no batch waits for others to complete an update."""
        return self.update.is_between_updates

    def new_context(self, scope: Scope) -> StepContext:
        """Return a pass of the training's step."""
        return new_context(self._model, "training", self.step, scope, self._backward)

    def brought(self, read: Iterator[Any], done: int) -> Iterator[Batch]:
        """Return an epoch's batches on their way to the step.

        Args:
            read: the batches as they are read.
            done: how many of the epoch come before them.
        """
        batches = self.step.mover.bring_each(self.step.looking(read))
        if self.changes is not None:
            batches = self.changes.each(batches, done)
        return self.update.peekable(batches)

    def executor(
        self, learn: Callable[[Batch, int, Logbook], object], record: Logbook, *, is_first: bool
    ) -> Learning:
        """Return what makes an epoch's steps.

        Args:
            learn: learns from a batch, by `update`.
            record: the epoch's values.
            is_first: whether it is the fit's first epoch, after whose first batch ranks share what
                the net's first forward has set.
        """
        after_first = None
        if is_first and self._strategy.collectives.world_size > 1:
            after_first = partial(self._strategy.after_first_batch, self._model, self.optimizers)
        return Learning(self.update, learn, record, after_first)

    def follow_freezing(self) -> None:
        """Wrap the module again if a callback has frozen or unfrozen parameters.

        Ranks:
            Collective.
        """
        learns = self._which_learn()
        if learns != self._learns:
            self._learns = learns
            if self.step.wrapped.rewrap is not None:
                self.step.wrapped.rewrap()
            if self._strategy.engine is not None:
                self._strategy.engine.rewrap()

    def _which_learn(self) -> list[bool]:
        trained = self._model._fitkit.compilation.trained(self._model)
        return [parameter.requires_grad for parameter in trained.parameters()]

    def saved_data(self) -> PlainData:
        """Return what a checkpoint notes of how batches are changed."""
        return {} if self.changes is None else {BEFORE: self.changes.first}


def _step(model: Module, arguments: FitArguments, source: Source, held_out: list[Source]) -> Step:
    """Return the training's step. All targets that are in memory are checked with the first."""
    changes_batches = bool(model._fitkit.compilation.given.batch_transforms)  # and perhaps targets
    by_class = arguments.weights_by_class
    step = step_for(
        model,
        "training",
        class_weights=by_class,
        all_targets=None if changes_batches else [one.target for one in (source, *held_out)],
        source=source,
    )
    if by_class is not None and not changes_batches:
        by_class.expect(source.target, model._fitkit.compilation.strategy.collectives.rank)
    return step


def _rates(
    model: Module, arguments: FitArguments, data: FitData, accumulate: int, scope: Scope
) -> Rates:
    """Return the rates of a fit, which ask how many updates its epochs have."""
    place, callbacks = data.place, arguments.callback_list.callbacks
    lengths = EpochLengths(callbacks, arguments.source, data.stream.steps, accumulate, place.shares)
    before = lengths.updates_after(arguments.initial_epoch, place.steps)
    return Rates(model, arguments, scope, lengths.updates(arguments.batch_size), before)
