"""Turn a batch's loss into new weights: backward, accumulation, clipping, the optimizer's step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fitkit import trees
from fitkit.checkpoint import check_fused_state
from fitkit.closures import uses_closure
from fitkit.data.batches import Batch, NoRows
from fitkit.data.to_device import own_data
from fitkit.distributed.precision import match_state
from fitkit.distributed.strategies import Engine, Strategy
from fitkit.errors import ConfigurationError
from fitkit.fit_state import FitState
from fitkit.guests import guest_of
from fitkit.hooks import overridden, step_arguments
from fitkit.modes import parameters_of
from fitkit.module import Module
from fitkit.optimizer_copies import with_inner
from fitkit.optimizers import (
    OptimizerList,
    check_changeable,
    check_trainable,
    fuse,
    held_by,
    members_of,
    unfuse_if_unreadable,
)
from fitkit.trained import share
from fitkit.training.applier import Applier, ScaledApplier
from fitkit.training.compiler import Updates, compiler_of
from fitkit.training.empty_parts import without_gradients_of_nothing
from fitkit.training.log import Logbook
from fitkit.training.manual import Manual, check_manual, exchange_gradients
from fitkit.training.memory_layout import match_strides
from fitkit.training.rates import Rates
from fitkit.training.reevaluation import Evaluated, Reevaluation
from fitkit.training.second_order import backward_with_graph, needs_graph
from fitkit.training.step import Outcome
from fitkit.training.step_for import Step
from fitkit.training.tally import CarriedTally, Tally
from fitkit.training.weighing import (
    Known,
    Late,
    Number,
    Weighing,
    count_in,
)

if TYPE_CHECKING:
    from fitkit.extras.loss_scaling import Scaling

AS_IS = contextlib.nullcontext()
"""What surrounds a step that is an update by itself, or completes one."""


def updates_for(
    model: Module,
    step: Step,
    *,
    accumulate: int | None = None,
    rates: Rates | None = None,
) -> Update | ByTurns | Manual:
    """Choose how training batches make updates: by one optimizer, by several in turn, or manually.

    Args:
        model: the model to train.
        step: computes losses.
        accumulate: the number of batches in an update; None for the number given to `compile`.
        rates: moves the learning rates after each update; None if they stay.
    """
    state, strategy = model._fitkit.fit_state, model._fitkit.compilation.strategy
    optimizers = ready_optimizers(model)
    several = state.takes_turns
    if len(optimizers) > 1 and not several and model.automatic_optimization:
        optimizers = [OptimizerList(optimizers)]
    scalings = state.scalings_for(strategy, len(optimizers) if model.automatic_optimization else 1)
    state.accumulate = accumulate or model._fitkit.compilation.given.accumulate_grad_batches
    kind = Update
    if model._fitkit.compilation.given.out_of_memory == "split":
        from fitkit.extras.splitting import UpdateInParts as kind  # noqa: N813

    updates = [
        kind(model, step, optimizer, scaling, rates, is_one_of_several=several)
        for optimizer, scaling in zip_longest(optimizers, scalings)
    ]
    if not model.automatic_optimization:
        check_manual(model)
        return Manual(model, step)
    takes_turns = "optimizer_idx" in step_arguments(model, "training_step")
    if several and overridden(model, "training_step") and not takes_turns:
        raise ConfigurationError(
            f"configure_optimizers returned {len(updates)} optimizers, but training_step has no "
            "argument optimizer_idx. Write def training_step(self, batch, batch_idx, "
            "optimizer_idx), or set automatic_optimization = False and call the optimizers' step "
            "in it."
        )
    return ByTurns(updates, state) if several else updates[0]


def backward_of(update: object) -> Callable[..., None] | None:
    """Return what a step calls to compute gradients, if it makes its own updates."""
    return update.backward if isinstance(update, Manual) else None


def ready_optimizers(model: Module) -> list[Optimizer]:
    """Return the model's optimizers, with states that match the parameters, ready for a step."""
    trained = model._fitkit.compilation.trained(model)
    check_trainable(trained.learning())
    check_changeable(model._weights_module(), *trained.beside.values())
    optimizers: list[Optimizer] = model._made_optimizers()
    is_named, guest = _is_named(model), guest_of(model)
    for optimizer in optimizers:
        if is_named:
            fuse(optimizer, model)
        check_fused_state(optimizer)
        for one in with_inner([optimizer]):
            match_state(one)
        match_strides([optimizer])
        model._fitkit.compilation.strategy.precision.check_optimizer(optimizer)
        if guest is not None:
            guest.watch(optimizer)
    return optimizers


def _is_named(model: Module) -> bool:
    """Return whether fitkit made the optimizer from a name, and may choose its implementation."""
    return model._fitkit.compilation.optimizer.is_name and not model._configures_optimizers


class Upcoming:
    """An iterator over batches that can also look ahead at the next ones."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._seen: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._batches)

    def peek(self, count: int) -> list[Any]:
        """Return the next `count` batches that have rows, or fewer if fewer are left."""
        found = [batch for batch in self._seen if batch is not NoRows]
        while len(found) < count and (batch := next(self._batches, None)) is not None:
            if batch is not NoRows:
                batch = dataclasses.replace(batch, data=trees.kept(batch.data))
                found.append(batch)
            self._seen.append(batch)
        return found[:count]


class Learning:
    """Makes the steps of an epoch, and its updates.

    Args:
        update: makes the updates.
        learn: learns from a batch, by `update`.
        record: the epoch's values.
        after_first: called once, after the first batch; None for nothing.
    """

    def __init__(
        self,
        update: Updates,
        learn: Callable[..., object],
        record: Logbook,
        after_first: Callable[[], None] | None,
    ) -> None:
        self._update = update
        self._learn: Callable[[Batch, int], object] = partial(learn, record=record)
        self._after_first = after_first

    @property
    def make(self) -> Callable[[Batch, int], object]:
        """What learns from a batch. A method of this object isn't kept in it: in a ring, data
        workers would outlive an error.
        """
        return self._learn if self._after_first is None else self._with_first

    def _with_first(self, batch: Batch, index: int) -> None:
        self._learn(batch, index)
        if self._after_first is not None:
            after_first, self._after_first = self._after_first, None
            after_first()

    def skip(self) -> None:
        """Nothing is learned from a batch without rows."""

    def flush(self) -> None:
        """Learn from the batches that are held."""
        self._update.flush()

    def end(self) -> None:
        """Learn from what is left, also in a group that is shorter than others."""
        self._update.flush()
        self._update.finish()


class Update:
    """Makes one optimizer's updates: one from each batch, or from each group of batches.

    Args:
        model: the model to train.
        step: computes a batch's loss.
        optimizer: makes the update.
        scaling: scales losses if half precision needs that, else None.
        rates: moves the learning rates after each update; None if they stay.
        is_one_of_several: whether other optimizers take turns with this one. Their steps bypass
            the wrapper that averages gradients over the ranks, so this class averages them. It
            does so for compiled steps too.

    An update equals the one from all its batches, over all ranks, as a single batch. That holds
    also if batches differ in length or the last group is short. For this, each batch's loss is
    weighed before its backward, and the gradients are corrected at the end (`weighing.py`).

    Samples are known on all ranks before the step, but not those of the group's later batches:
    reading these earlier would change the order of random numbers. What else a loss is the mean
    over is known after the forward, and only on its rank. Both weigh as `Late`. The losses of
    several outputs, which are means over different things, need all counts of the group before its
    first backward. So their group's batches are read ahead (`Known`).

    `FitState.accumulate` is the number of batches in an update. Callbacks may change it; a change
    takes effect with the next group.

    Attributes:
        step, optimizer: as given.
        parameters: those that learn.
        accumulate: the number of batches in the group.
        is_part: whether a batch is only a part of an update's samples.
        backward: computes the gradients of a loss.
        apply: makes the update from the gradients of a group.
    """

    def __init__(
        self,
        model: Module,
        step: Step,
        optimizer: Optimizer,
        scaling: Scaling | None,
        rates: Rates | None,
        *,
        is_one_of_several: bool,
    ) -> None:
        compilation = model._fitkit.compilation
        trained = compilation.trained(model)
        strategy: Strategy = compilation.strategy
        self.step: Step = step
        self.optimizer: Optimizer = optimizer
        self._upcoming = Upcoming(iter(()))
        self._looks_at_gradients = _is_named(model)
        # Without an engine of the strategy's own, the base class does as torch does.
        engine = self._engine = strategy.engine or Engine()
        self._fit_state: FitState = model._fitkit.fit_state
        # Whether an update is made that has no gradients, as its batches have all been left out.
        self._counts_left_out = model._counts_left_out
        self._strategy = strategy
        self._is_alone = strategy.collectives.world_size == 1
        self._ranks = strategy.data_ranks.world_size
        self._scaling = scaling
        self.backward: Callable[..., None] = engine.backward
        # Without a wrapper that averages gradients within the backward pass (steps that a compiler
        # makes, sparse gradients, batches in parts) there is a list, which may be empty, of the
        # buffers that ranks share.
        self._buffers = step.wrapped.shared_buffers
        # No wrapper shares these, as DDP does the model's before a forward.
        self._buffers_beside = [] if self._is_alone else trained.buffers_beside()
        # Whether this object averages the gradients over the ranks, before an update.
        self._exchanges = is_one_of_several or self._buffers is not None
        self.parameters: list[torch.nn.Parameter] = (
            held_by(optimizer) if is_one_of_several else trained.parameters()
        )
        move_rates = None if rates is None else rates.after_update_of(optimizer)
        given = model, optimizer, engine, move_rates
        self.apply: Applier = Applier(*given) if scaling is None else ScaledApplier(*given, scaling)
        # No strategy knows the parameters beside the model, so their gradients are averaged here.
        has_outside = self._ranks > 1 and not self._exchanges
        self._outside = parameters_of(*trained.beside.values()) if has_outside else []
        ranks, carrier = strategy.data_ranks, step.wrapped.count_parameter
        self._tally = Tally(ranks)
        if carrier is not None and not is_one_of_several:  # these bypass the wrapper
            self._tally = CarriedTally(ranks, carrier, by_hand=self._exchanges)
        self._averaged = [*self.parameters, *self._tally.parameters]
        # Surrounds all batches of a group but the last, after which gradients are exchanged.
        self._accumulating: Callable[[], AbstractContextManager[Any]] = (
            step.wrapped.accumulating or engine.accumulating
        )
        self._batches = 0  # in the group so far
        self._group: Weighing | None = None  # how its batches weigh; None before its first
        # For an optimizer that computes the loss itself.
        self._again = Reevaluation() if uses_closure(optimizer) else None
        if needs_graph(optimizer):
            self.backward = backward_with_graph(
                optimizer,
                strategy,
                scales=scaling is not None,
                is_compiled=compiler_of(model) is not None,
            )
        if self._again is not None and scaling is not None:
            from fitkit.extras.loss_scaling import CLOSURE

            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        self._regroup()

    def _regroup(self) -> None:
        """Read the current number of batches in an update; call this between two groups."""
        self.accumulate: int = self._fit_state.accumulate
        self.is_part: bool = self.accumulate > 1 or self._ranks > 1
        self._exchanged = not self._exchanges

    @property
    def is_between_updates(self) -> bool:
        """Whether no batch waits for the rest of its group."""
        return self._batches == 0

    def peekable(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an epoch's batches, in an iterator that can look ahead if counts need that."""
        if not self.step.may_count:
            return batches
        self._upcoming = Upcoming(batches)
        return self._upcoming

    def peek_with(self, other: Update) -> None:
        """Look ahead at the same batches as another optimizer's updates."""
        self._upcoming = other._upcoming

    def begin(self) -> None:
        """Begin a group of batches, unless one has begun.

        Ranks:
            Collective, if they share buffers.
        """
        if self._batches:
            return
        if self.accumulate != self._fit_state.accumulate:
            self._regroup()
        for parameter in self._averaged:
            parameter.grad = None
        if self._buffers:
            self._strategy.collectives.broadcast_tensors(self._buffers)
        if self._buffers_beside:
            share(self._buffers_beside, self._strategy)

    def __call__(
        self, batch: Batch, index: int, record: Logbook, *, begins: bool = True, **optimizer: Any
    ) -> Outcome:
        """Learn from a batch: compute its loss, and make the update if the group is complete.

        Args:
            batch: the batch.
            index: its number in the epoch.
            record: the pass's values, to which its own are added.
            begins: whether it may begin a group; False if `begin` was called for it.
            optimizer: `optimizer_idx`, if several optimizers take turns.

        Returns:
            What the step found.
        """
        if begins:
            self.begin()
        if self._again is not None:  # each evaluation of the loss gets the batch as it came
            batch.data, batch.is_lent = own_data(batch), True
        step, is_part = self.step, self.is_part
        with self._around_step() if self.accumulate > 1 else AS_IS:
            outcome = step(batch, index, is_part=is_part, **optimizer)
            guard = self._fit_state.guard
            if guard is None or guard.counts(self.optimizer, batch, outcome):
                step.record(batch, outcome, record)
            outcome.outputs = None  # nothing more reads them, and they may be large
            if self._again is not None and outcome.loss is not None:
                again = partial(step.again, batch, index, is_part=is_part, **optimizer)
                self._again.parts.append((batch, again))
            self.learn_from(batch, outcome)
        return outcome

    def _around_step(self) -> AbstractContextManager[Any]:
        """Surround a step, so that a group's gradients are exchanged only with its last batch."""
        if self._batches + 1 < self.accumulate:
            self._exchanged = False
            return self._accumulating()
        self._exchanged = not self._exchanges
        return AS_IS

    def learn_from(self, batch: Batch, outcome: Outcome) -> None:
        """Learn from a batch's loss, which is a mean over what counts in this rank's batch.

        What counts weighs the same in every batch and on every rank. A batch of 0 samples has no
        weight.
        """
        if outcome.loss is None:
            self.check_alone()
            if self.is_part:  # a batch that is left out is one of its group's all the same
                self._count()
            elif self._counts_left_out:
                self.apply()
            return
        if not self.is_part:
            self._add_gradients(outcome.loss, count_in(batch, outcome.count))
            if self._exchanges:
                exchange_gradients(self._strategy, self.parameters)
            self._update()
            return
        if self._group is None:
            self._group = self._weighing(batch, outcome)
        self._add_gradients(*self._group.part(batch, outcome))
        self._count()

    def _count(self) -> None:
        """Count a batch of the group, and make the update if that is complete."""
        self._batches += 1
        if self._batches == self.accumulate:
            self.finish()

    def check_alone(self) -> None:
        """Refuse a step without a loss where other ranks wait for its gradients."""
        if not self._is_alone:
            raise ConfigurationError(
                "training_step returned None to skip a batch, but several ranks make each "
                "step together. Return a loss of 0 * (the sum of the net's outputs) instead.",
                code="FK025",
            )

    def _weighing(self, batch: Batch, outcome: Outcome) -> Weighing:
        """Choose how the batches of a group weigh.

        Args:
            batch: the group's first.
            outcome: what its step found.

        Ranks:
            Collective, for several outputs; otherwise at most once in a fit.
        """
        if outcome.counts_apart:
            mine = [float(count_in(batch, term.count)) for term in outcome.terms]
            left = self.accumulate - 1 - self._batches  # some may have been left out
            coming = map(self.step.counts_of, self._upcoming.peek(left))
            sums = [sum(column) for column in zip(mine, *coming, strict=True)]
            names = [term.name for term in outcome.terms]
            by_name = dict(zip(names, sums, strict=True))
            return Known(self._strategy.data_ranks.sums(sums), by_name, self._ranks)
        expected = float(max(batch.total, 1) * self.accumulate)  # as many samples in each
        # Several ranks ask by what all know: a step may give a count on some of them only.
        asks = self.step.may_count if self._ranks > 1 else outcome.count is not None
        if asks:
            expected *= self._tally.per_sample(count_in(batch, outcome.count), batch.total)
        return Late(expected, self._ranks, asks)

    def _add_gradients(self, loss: torch.Tensor, count: Number) -> None:
        """Add the gradients of a part of a group, and its count to the tally.

        Where nothing counts in it, they are 0.
        """
        if self._again is not None:
            self._again.add(loss)
        is_known = not isinstance(count, torch.Tensor)
        if (is_known and not count) or (not is_known and self.step.may_be_nan):
            with without_gradients_of_nothing(loss, count):
                self._backward(loss, count)
        else:
            self._backward(loss, count)

    def _backward(self, loss: torch.Tensor, count: Number) -> None:
        if self._scaling is None:
            self.backward(self._tally.joined(loss, count))
        else:  # the loss is scaled, the count isn't
            joined = partial(self._tally.joined, count=count)
            self._scaling.backward(loss, lambda scaled: self.backward(joined(scaled)))

    def flush(self) -> None:
        """Do nothing: no batch is held."""

    def finish(self) -> None:
        """Make the update of a complete group, or of a shorter one at the epoch's end."""
        if self._batches == 0:
            return
        group, self._group, self._batches = self._group, None, 0
        if group is not None:
            self._complete(group)
            self._update()
        elif self._counts_left_out:
            self.apply()

    def _complete(self, group: Weighing) -> None:
        """Make the gradients of all of a group's parts those of the group.

        Ranks:
            Collective.
        """
        if not self._exchanged:
            exchange_gradients(self._strategy, self._averaged)
        factor = group.correction(self._tally.over_ranks)
        if factor is not None:
            self._engine.scale(self.parameters, factor)
        if self._again is not None:
            self._again.group = group
            if factor is not None and self._again.total is not None:
                self._again.total = self._again.total * factor

    def _with_closure(self, noted: Reevaluation) -> None:
        """Make an update by an optimizer that may compute the loss again, any number of times."""
        self.apply.clip()
        evaluated: Evaluated | None = Evaluated(self.parameters)

        def closure() -> torch.Tensor:
            nonlocal evaluated
            before, evaluated = evaluated, None
            if before is None or not before.still_holds():
                with torch.enable_grad():
                    self._compute_again(noted)
                self.apply.clip()
            total = noted.total
            assert total is not None
            if self._ranks == 1:
                return total
            # This number tells the optimizer when to stop, so it must be the same on all ranks.
            (summed,) = self._strategy.data_ranks.sums([total.item()])
            return total.new_tensor(summed / self._ranks)

        self.apply.with_closure(closure)
        noted.begin()

    def _compute_again(self, noted: Reevaluation) -> None:
        """Compute an update's gradients again, at the weights of now.

        Ranks:
            Collective.
        """
        noted.total = None
        for parameter in self._averaged:
            parameter.grad = None
        group = None if noted.group is None else noted.group.anew()
        last = len(noted.parts) - 1
        for number, (batch, again) in enumerate(noted.parts):
            with AS_IS if number == last else self._accumulating():
                outcome = again()
                assert outcome.loss is not None
                if group is None:
                    self._add_gradients(outcome.loss, batch.samples)
                else:
                    self._add_gradients(*group.part(batch, outcome))
        self._exchanged = not self._exchanges
        if group is not None:
            self._complete(group)
        elif self._exchanges:
            exchange_gradients(self._strategy, self.parameters)
        if self._outside:
            self._strategy.data_ranks.mean_gradients(self._outside)

    def _update(self) -> None:
        if self._outside:
            self._strategy.data_ranks.mean_gradients(self._outside)
        if self._looks_at_gradients:
            self._looks_at_gradients = False
            for optimizer in members_of(self.optimizer):
                unfuse_if_unreadable(optimizer)
        if self._again is None:
            self.apply()
        else:
            self._with_closure(self._again)


class ByTurns:
    """Makes updates by several optimizers: all of them for each batch, or one of them by turns.

    While an optimizer's step runs, only its own parameters require gradients.

    Args:
        updates: one for each optimizer; the step gets the optimizer's number.
        state: holds the optimizers, and for how many batches in a row each one is used.
    """

    def __init__(self, updates: list[Update], state: FitState) -> None:
        self.updates = updates
        self._state = state
        turns = state.frequencies or []
        self._turns = [number for number, count in enumerate(turns) for _ in range(count)]

    def __call__(self, batch: Batch, index: int, record: Logbook) -> None:
        numbers = range(len(self.updates))
        if self._turns:
            turn = self._turns[index % len(self._turns)]
            numbers = range(turn, turn + 1)
        batch.is_lent = True  # each optimizer's step gets the batch as it came
        for number in numbers:
            frozen = self._state.freeze_others(self.updates[number].optimizer)
            try:
                self.updates[number](batch, index, record, optimizer_idx=number)
            finally:
                for parameter in frozen:
                    parameter.requires_grad_(True)

    def peekable(self, batches: Iterator[Any]) -> Iterator[Any]:
        first, *others = self.updates
        batches = first.peekable(batches)
        for other in others:
            other.peek_with(first)
        return batches

    @property
    def is_between_updates(self) -> bool:
        return all(update.is_between_updates for update in self.updates)

    def flush(self) -> None:
        """Do nothing: no batch is held."""

    def finish(self) -> None:
        for update in self.updates:
            update.finish()
