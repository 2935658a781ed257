"""Turn a batch's loss into new weights: backward, accumulation, clipping, the optimizer's step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit import trees
from fitkit.accelerators import widest_dtype
from fitkit.checkpoint import check_fused_state
from fitkit.data.batches import Batch, NoRows
from fitkit.distributed.precision import CLOSURE, Scaling, match_state
from fitkit.distributed.strategies import Engine, Strategy
from fitkit.errors import ConfigurationError
from fitkit.fit_state import FitState
from fitkit.guests import guest_of
from fitkit.hooks import overridden, step_arguments
from fitkit.losses import Term
from fitkit.module import Module
from fitkit.optimizers import (
    OptimizerList,
    check_trainable,
    fuse,
    held_by,
    members_of,
    needs_closure,
    unfuse_if_unreadable,
)
from fitkit.training.applier import Applier, ScaledApplier
from fitkit.training.compiler import compiler_of
from fitkit.training.manual import Manual, check_manual, exchange_gradients, manual_backward
from fitkit.training.own_step import Step, StepContext
from fitkit.training.rates import Rates
from fitkit.training.second_order import backward_with_graph, needs_graph
from fitkit.training.step import Outcome
from fitkit.training.surroundings import match_strides
from fitkit.training.weighing import count_in, nothing_if

TINY = torch.finfo(torch.float64).tiny

AS_IS = contextlib.nullcontext()
"""What surrounds a step that is an update by itself, or completes one."""


def updates_for(
    model: Module,
    context: StepContext,
    step: Step,
    *,
    accumulate: int | None = None,
    rates: Rates | None = None,
) -> Update | ByTurns | Manual:
    """Choose how training batches make updates: by one optimizer, by several in turn, or manually.

    Args:
        model: the model to train.
        context: the training's context; manual optimization gets its `backward` from it.
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
    updates = [
        Update(model, step, optimizer, scaling, rates, is_one_of_several=several)
        for optimizer, scaling in zip_longest(optimizers, scalings)
    ]
    if not model.automatic_optimization:
        check_manual(model)
        parameters = model._fitkit.compilation.trainable(model)
        context.backward = partial(manual_backward, model, context, parameters)
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


def ready_optimizers(model: Module) -> list[Optimizer]:
    """Return the model's optimizers, with states that match the parameters, ready for a step."""
    trainable = model._fitkit.compilation.trainable(model)
    check_trainable(trainable)
    optimizers: list[Optimizer] = model._made_optimizers()
    is_named, guest = _is_named(model), guest_of(model)
    for optimizer in optimizers:
        if is_named:
            fuse(optimizer, model)
        check_fused_state(optimizer)
        match_state(optimizer)
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
                batch = Batch(trees.kept(batch.data), batch.samples, batch.total)
                found.append(batch)
            self._seen.append(batch)
        return found[:count]


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

    An update equals the one from all its batches, over all ranks, as a single batch. For this,
    each batch's gradients are weighted by the count that its loss is the mean over. That holds
    also if batches differ in length or the last group is short. There are three weightings:

    1. The loss is a mean over samples (`learn_from`). Their number is known on all ranks before the
       step, so `backward` applies the weight. In a group, gradients are scaled as if all batches
       had as many samples as the first, and corrected at the group's end.
    2. The loss is a mean over something else, such as the labels that count (`_learn_counted`).
       The weight is a guess, which is corrected once the gradients are exchanged. The counts of
       the other ranks come with the gradients if the strategy has a `count_parameter`. Otherwise
       they cost an exchange.
    3. The losses of several outputs are means over different counts (`_learn_terms`). No single
       factor can correct them afterwards. So the counts of the whole group are computed before
       its first backward.

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
        strategy: Strategy = compilation.strategy
        self.step: Step = step
        self.optimizer: Optimizer = optimizer
        self._upcoming = Upcoming(iter(()))
        self._looks_at_gradients = _is_named(model)
        # Without an engine of the strategy's own, the base class does as torch does.
        engine = self._engine = strategy.engine or Engine()
        self._fit_state: FitState = model._fitkit.fit_state
        self._strategy = strategy
        self._is_alone = strategy.collectives.world_size == 1
        self._ranks = strategy.data_ranks.world_size
        self._scaling = scaling
        self.backward: Callable[..., None] = engine.backward
        if scaling is not None:
            self.backward = partial(scaling.backward, through=self.backward)
        # A compiled step has no wrapper that averages gradients within the backward pass. It has a
        # list then, of the buffers that ranks share, which may be empty.
        self._buffers = step.wrapped.shared_buffers
        # Whether this object averages the gradients over the ranks, before an update.
        self._exchanges = is_one_of_several or self._buffers is not None
        self.parameters: list[torch.nn.Parameter] = (
            held_by(optimizer) if is_one_of_several else compilation.trainable(model)
        )
        move_rates = None if rates is None else rates.after_update_of(optimizer)
        given = model, optimizer, self.parameters, engine, move_rates
        self.apply: Applier = Applier(*given) if scaling is None else ScaledApplier(*given, scaling)
        # No strategy knows a loss's own parameters, so their gradients are averaged here.
        has_outside = self._ranks > 1 and not self._exchanges
        self._outside = compilation.loss_parameters() if has_outside else []
        # Sends a count along with the gradients; there is none if they bypass the wrapper.
        self._carrier = None if is_one_of_several else step.wrapped.count_parameter
        # Surrounds all batches of a group but the last, after which gradients are exchanged.
        self._accumulating: Callable[[], AbstractContextManager[Any]] = (
            step.wrapped.accumulating or engine.accumulating
        )
        self._batches = 0  # in the group so far
        self._samples = 0  # in the group so far, on all ranks
        self._counted: Any = None  # count in the group so far, on this rank; None if samples count
        self._per_sample: float | None = None  # a sample's approximate count: a power of 2
        self._totals: list[float] | None = None  # each output's count in the group, on all ranks
        self._to_come: dict[str, float] = {}  # what is left of it in this rank's batches to come
        self._first = 1  # samples of the group's first step, on all ranks
        self._takes_closure = needs_closure(optimizer)
        if needs_graph(optimizer):
            self.backward = backward_with_graph(
                optimizer,
                strategy,
                scales=scaling is not None,
                is_compiled=compiler_of(model) is not None,
            )
        if self._takes_closure and scaling is not None:
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        self._regroup()

    def _regroup(self) -> None:
        """Read the current number of batches in an update; call this between two groups."""
        accumulate = self._fit_state.accumulate
        if self._takes_closure and accumulate > 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={accumulate} doesn't work with "
                f"{type(self.optimizer).__name__}, which computes the loss several times in each "
                "step. Write accumulate_grad_batches=1."
            )
        self.accumulate: int = accumulate
        self.is_part: bool = accumulate > 1 or self._ranks > 1
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
        for parameter in self.parameters:
            parameter.grad = None
        if self._carrier is not None:
            self._carrier.grad = None
        if self._buffers:
            self._strategy.collectives.broadcast_tensors(self._buffers)

    def __call__(
        self, batch: Batch, index: int, *, begins: bool = True, **optimizer: Any
    ) -> Outcome:
        """Learn from a batch: compute its loss, and make the update if the group is complete.

        Args:
            batch: the batch.
            index: its number in the epoch.
            begins: whether it may begin a group; False if `begin` was called for it.
            optimizer: `optimizer_idx`, if several optimizers take turns.

        Returns:
            What the step found.
        """
        if begins:
            self.begin()
        step, is_part = self.step, self.is_part
        with self._around_step() if self.accumulate > 1 else AS_IS:
            outcome = step(batch, index, is_part=is_part, **optimizer)
            step.record(batch, outcome)
            outcome.outputs = None  # nothing more reads them, and they may be large
            if self._takes_closure and outcome.loss is not None:
                again = partial(step.again, batch, index, is_part=is_part, **optimizer)
                self._step_with_closure(batch, outcome, again)
            else:
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
        """Learn from a batch's loss, which is a mean over this rank's batch.

        Each sample weighs the same on every rank. A batch of 0 samples has no weight.
        """
        loss, samples, total = outcome.loss, batch.samples, batch.total
        if loss is None:
            if not self._is_alone:
                raise ConfigurationError(
                    "training_step returned None to skip a batch, but several ranks make each "
                    "step together. Return a loss of 0 * (the sum of the net's outputs) instead."
                )
            return
        if outcome.counts_apart:
            self._learn_terms(loss, outcome.terms, samples)
            return
        if outcome.count is not None or self._carrier is not None:
            self._learn_counted(loss, count_in(batch, outcome.count), total)
            return
        if self.accumulate == 1:
            weight = samples * self._ranks
            self.backward(loss if weight == total else loss * (weight / total))
            if self._exchanges:
                exchange_gradients(self._strategy, self.parameters)
            self._update()
            return
        if self._batches == 0:
            self._first = max(total, 1)
            self._samples = 0
        # Scale as if every step of the group had as many samples as its first; `finish` corrects.
        self.backward(loss * (samples * self._ranks / (self._first * self.accumulate)))
        self._batches += 1
        self._samples += total
        if self._batches == self.accumulate:
            self.finish()

    def _learn_counted(self, loss: torch.Tensor, count: float | torch.Tensor, total: int) -> None:
        """Learn from a loss that is the mean over `count`, which differs between batches."""
        if self.accumulate == 1 and self._ranks == 1:
            self.backward(loss)
            self._update()
            return
        if self._batches == 0:
            self._first, self._samples, self._counted = max(total, 1), 0, 0
            if self._per_sample is None:
                self._per_sample = self._guess(count, total)
        expected = self._first * self.accumulate * (self._per_sample or 1.0)
        self._backward_part(loss, count, count * (self._ranks / expected))
        self._batches += 1
        self._samples += total
        self._counted = self._counted + count
        if self._batches == self.accumulate:
            self.finish()

    def _guess(self, count: float | torch.Tensor, total: int) -> float:
        """Estimate a sample's count, so that gradients have about the right size from the start.

        The estimate is a power of 2, which rounds nothing. So a resumed training computes the same
        bits, even with a different estimate.

        Ranks:
            Collective, once in a fit.
        """
        (whole,) = self._strategy.data_ranks.sums([float(count)])
        return 2.0 ** round(math.log2(whole / total)) if whole > 0 and total else 1.0

    def _learn_terms(self, loss: torch.Tensor, terms: Sequence[Term], samples: int) -> None:
        """Learn from the losses of several outputs, which are means over different counts.

        No single factor can correct them afterwards, so the group's counts are computed first.
        """
        counts = [samples if term.count is None or not samples else term.count for term in terms]
        if self.accumulate == 1 and self._ranks == 1:
            self.backward(loss)
            self._update()
            return
        if self._totals is None:
            coming = self._upcoming.peek(self.accumulate - 1) if self.accumulate > 1 else []
            rest = [self.step.counts_of(batch) for batch in coming]
            sums = [sum(map(float, column)) for column in zip(counts, *rest, strict=True)]
            self._totals = self._strategy.data_ranks.sums(sums)
            self._to_come = dict(zip((term.name for term in terms), sums, strict=True))
        for term, count in zip(terms, counts, strict=True):
            if isinstance(count, (int, float)):
                self._to_come[term.name] -= count
            else:  # reading it may wait
                self._to_come[term.name] = 0.0
        weighed = [
            nothing_if(term.value, count) * (term.scale * count * self._ranks / max(whole, TINY))
            for term, count, whole in zip(terms, counts, self._totals, strict=True)
        ]
        self._backward_part(functools.reduce(torch.add, weighed), 1.0, 1.0)
        self._batches += 1
        if self._batches == self.accumulate:
            self.finish()

    def _backward_part(
        self, loss: torch.Tensor, count: float | torch.Tensor, weight: float | torch.Tensor
    ) -> None:
        """Compute the gradients of a part of a group, and add its count to the carrier."""
        loss, carrier = nothing_if(loss, count), self._carrier
        if carrier is None or self._exchanges:
            self.backward(loss * weight)
            if carrier is not None:
                counts = torch.as_tensor(count, dtype=carrier.dtype, device=carrier.device)
                carrier.grad = counts if carrier.grad is None else carrier.grad + counts
            return
        if self._scaling is not None:
            loss = self._scaling.scaler.scale(loss)
        # Equals a backward of loss * weight + carrier * count, with fewer operations.
        weighs = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        counts = torch.as_tensor(count, dtype=carrier.dtype, device=carrier.device)
        torch.autograd.backward((loss, carrier), (weighs, counts))

    def flush(self) -> None:
        """Do nothing: no batch is held."""

    def finish(self) -> None:
        """Make the update of a complete group, or of a shorter one at the epoch's end."""
        if self._batches == 0:
            return
        self._batches = 0
        if not self._exchanged:
            carriers = [] if self._carrier is None else [self._carrier]
            exchange_gradients(self._strategy, [*self.parameters, *carriers])
        # The count of the whole group is known now, so correct the gradients' scale.
        expected, found = float(self._first * self.accumulate), self._samples
        if self._totals is not None:
            expected, found = 1.0, 1
            if wrong := [name for name, count in self._to_come.items() if abs(count) > 0.5]:
                raise ConfigurationError(
                    f"The loss of {', '.join(wrong)} is a mean over values whose number can't be "
                    "known before the forward, but updates of several outputs and batches need it. "
                    "Let it return one value per sample, or write accumulate_grad_batches=1."
                )
        elif self._counted is not None:
            expected, found = expected * (self._per_sample or 1.0), self._counted_by_all()
        self._totals = self._counted = None
        if isinstance(found, torch.Tensor):
            factor = torch.where(found > 0, expected / found, 1.0)
            self._engine.scale(self.parameters, factor)
        elif found != expected:
            self._engine.scale(self.parameters, expected / found if found else 1.0)
        self._update()

    def _counted_by_all(self) -> Any:
        """Return the group's count over all ranks: a number, or a tensor on a GPU."""
        if self._ranks == 1:
            return self._counted
        carrier = self._carrier
        if carrier is None:
            return self._strategy.data_ranks.sums([float(self._counted)])[0]
        assert carrier.grad is not None  # a mean over the ranks
        # Round what should be a whole number. Other counts (sums of class weights) stay.
        if carrier.is_cpu:
            number = carrier.grad.item() * self._ranks
            return round(number) if abs(number - round(number)) < 1e-6 * number else number
        whole = carrier.grad.to(widest_dtype(carrier.device)) * self._ranks
        rounded = whole.round()
        return torch.where((whole - rounded).abs() < 1e-6 * rounded, rounded, whole)

    def _step_with_closure(
        self, batch: Batch, outcome: Outcome, again: Callable[[], torch.Tensor]
    ) -> None:
        """Make an update by an optimizer that evaluates the loss itself, any number of times.

        Args:
            outcome: of the first evaluation.
            again: computes the loss again, at changed weights.
        """
        loss, mine, whole = outcome.loss, float(batch.samples), float(max(batch.total, 1))
        assert loss is not None
        if outcome.count is not None and self._ranks > 1:
            mine = float(count_in(batch, outcome.count))
            whole = max(*self._strategy.data_ranks.sums([mine]), TINY)
        waiting, weight = [loss], mine * self._ranks / whole

        def closure() -> torch.Tensor:
            with torch.enable_grad():
                value = waiting.pop() if waiting else again()
                for parameter in self.parameters:
                    parameter.grad = None
                if self._carrier is not None:
                    self._carrier.grad = None
                self._backward_part(value, mine, weight)
                if self._exchanges:
                    exchange_gradients(self._strategy, self.parameters)
                if self._outside:
                    self._strategy.data_ranks.mean_gradients(self._outside)
            self.apply.clip()
            if self._ranks == 1:
                return value.detach()
            # This number tells the optimizer when to stop, so it must be the same on all ranks.
            (summed,) = self._strategy.data_ranks.sums([nothing_if(value, mine).item() * mine])
            return value.detach().new_tensor(summed / whole)

        self.apply.with_closure(closure)

    def _update(self) -> None:
        if self._outside:
            self._strategy.data_ranks.mean_gradients(self._outside)
        if self._looks_at_gradients:
            self._looks_at_gradients = False
            for optimizer in members_of(self.optimizer):
                unfuse_if_unreadable(optimizer)
        self.apply()


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

    def __call__(self, batch: Batch, index: int) -> None:
        numbers = range(len(self.updates))
        if self._turns:
            turn = self._turns[index % len(self._turns)]
            numbers = range(turn, turn + 1)
        for number in numbers:
            frozen = self._state.freeze_others(self.updates[number].optimizer)
            try:
                self.updates[number](batch, index, optimizer_idx=number)
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
