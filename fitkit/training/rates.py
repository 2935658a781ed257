"""How the learning rates move during a fit: a gradual warmup, then the schedulers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch.optim import Optimizer

from fitkit.distributed.collectives import Collectives
from fitkit.errors import CheckpointError, ConfigurationError, warn
from fitkit.fit_state import FitState, put_back
from fitkit.module import Module
from fitkit.optimizers import first_rate, members_of, put_rate
from fitkit.schedulers import (
    VALIDATION_NAME,
    PlannedScheduler,
    SchedulerChoice,
    Span,
    own_interval,
)
from fitkit.scopes import Scope
from fitkit.training.check_state import check_scheduler_state
from fitkit.training.log import Logbook
from fitkit.training.settings import FitArguments
from fitkit.typing import PlainData, Values

LENGTHS = ("T_max", "total_steps", "total_iters", "total_updates")
"""The entries of a scheduler's state that give its length."""


class WarmUp:
    """Raises the rates linearly over the first updates, up to their values when it was created.

    Update k of n has the rate `target * (start + (1 - start) * k / n)`. Schedulers wait until the
    warmup is over. If other code sets a rate during it, that is the new target.

    Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
    arXiv:1706.02677. Scaling by the number of ranks is theirs, too.

    Args:
        groups: the optimizers' parameter groups, whose rates it sets from now on.
        updates: the number of updates, n.
        start: the fraction of the rates at the start. No update has a rate that low.
        done: the number of its updates that are over.
    """

    def __init__(self, groups: list[PlainData], updates: int, start: float, done: int = 0) -> None:
        self._groups = groups
        self._targets = [group["lr"] for group in groups]
        self._updates = updates
        self._start = start
        self._done = done
        self._last: list[float | torch.Tensor] = []
        self._set()

    @property
    def is_over(self) -> bool:
        """Whether the rates have reached their targets."""
        return self._done >= self._updates

    def state(self) -> PlainData:
        """Its part of a checkpoint."""
        self._follow()
        return {"done": self._done, "targets": [float(target) for target in self._targets]}

    def step(self) -> None:
        """Record an update, before it is over."""
        self._follow()
        self._done += 1
        self._set()

    def end(self) -> None:
        """Set the groups to their target rates, if they haven't reached them yet."""
        if not self.is_over:
            self._follow()
            for group, target in zip(self._groups, self._targets, strict=True):
                group["lr"] = target

    def _set(self) -> None:
        part = min((self._done + 1) / self._updates, 1.0)
        factor = self._start + (1.0 - self._start) * part
        for group, target in zip(self._groups, self._targets, strict=True):
            group["lr"] = target * factor
        self._last = [group["lr"] for group in self._groups]

    def _follow(self) -> None:
        """Take rates that other code has set since as the new targets."""
        for index, (group, last) in enumerate(zip(self._groups, self._last, strict=True)):
            if group["lr"] is not last:
                self._targets[index] = self._last[index] = group["lr"]


class Rates:
    """Moves the learning rates of one `fit`: first the warmup, after it the schedulers.

    A scheduler moves after an update (`interval="step"`) or after an epoch. `ReduceLROnPlateau`
    also needs a value: that of the last step, of a validation or of the epoch.

    Args:
        model: the model that is trained. Its optimizers exist.
        arguments: the arguments of `fit`.
        scope: the fit's, at whose end a warm-up that isn't over sets the rates to its targets.
        updates: from which epochs on, the first from 0, an epoch has how many updates; None if
            unknown.
        before: the number of updates that were made before in the first epoch.
    """

    def __init__(
        self,
        model: Module,
        arguments: FitArguments,
        scope: Scope,
        updates: tuple[tuple[int, int], ...] | None,
        before: int = 0,
    ) -> None:
        compilation, state = model._fitkit.compilation, model._fitkit.fit_state
        self._arguments = arguments
        self._contexts = model._fitkit.contexts
        self._data_ranks: Collectives = compilation.strategy.data_ranks
        factor = state.scale_rates(compilation.given.scale_lr, self._data_ranks.world_size)
        resumed = arguments.resumed
        given, choice = compilation.given.warmup_epochs, compilation.scheduler
        part = choice.warmup_part if choice is not None and given is None else 0.0
        number, changes = (None, ()) if updates is None else (updates[0][1], updates[1:])
        span = Span(arguments.epochs, number, 0, arguments.initial_epoch, before, changes=changes)
        length = _part_of_training(part, span) if part else _warm_up_length(given, span)
        done = (span.updates_before(arguments.initial_epoch) or 0) + before
        if resumed is not None and resumed.warm_up is not None:
            done = round(resumed.warm_up["done"] * resumed.shares / self._data_ranks.world_size)
        elif resumed is not None and not part:  # it is over, or never was
            length = min(length, done)
        span = dataclasses.replace(span, warm_up=length)
        self._schedulers: list[PlannedScheduler] = schedulers_for(
            model, span, resumes=resumed is not None
        )
        self._warm_up: WarmUp | None = None
        if done < length:
            # It starts at the unscaled rates; at 0 if nothing was scaled.
            start = 1.0 / factor if factor != 1.0 else 0.0
            self._warm_up = WarmUp(state.groups, length, start, done)
            scope.callback(self._warm_up.end)
        self._leading: Optimizer = state.optimizers[0]
        self._at_epochs = [
            (plan, plan.stepper())
            for plan in self._schedulers
            if plan.interval == "epoch" and model.automatic_optimization
        ]
        self._warned_of: list[PlannedScheduler] = []  # schedulers whose value is missing

    @property
    def are_warm(self) -> bool:
        """Whether there is no warmup, or it is over."""
        return self._warm_up is None or self._warm_up.is_over

    def state(self) -> PlainData | None:
        """Return the warmup's part of a checkpoint. None if it is over, since schedulers move the
        rates then.
        """
        return None if self._warm_up is None or self._warm_up.is_over else self._warm_up.state()

    @property
    def read_steps(self) -> bool:
        """Whether a scheduler needs a step's value before the next step."""
        return any(plan.watches and plan.interval == "step" for plan in self._schedulers)

    def after_update_of(self, optimizer: Optimizer) -> Callable[[], object] | None:
        """Return the function to call after each update of an optimizer; None if nothing moves."""
        own = members_of(optimizer)
        moves = [
            partial(self._follow_step, plan) if plan.watches else plan.stepper()
            for plan in self._schedulers
            if plan.interval == "step" and (plan.optimizer is None or plan.optimizer in own)
        ]
        warm_up, leads = self._warm_up, self._leading in own
        if warm_up is None and len(moves) <= 1:
            return moves[0] if moves else None

        def move_all() -> None:
            if warm_up is not None and not warm_up.is_over:
                if leads:  # of several optimizers, one's updates count
                    warm_up.step()
                return
            for move in moves:
                move()

        return move_all

    def after_validation(self, epoch: int, values: Values) -> None:
        """Move the schedulers that watch a value of a validation within an epoch."""
        for plan, _ in self._at_epochs if self.are_warm else ():
            if plan.watches and (epoch + 1) % plan.frequency == 0:
                value = _value_in(values, self._names_for(plan))
                if value is not None:
                    plan.scheduler.step(value)

    def after_epoch(self, epoch: int, values: Values, seen: Collection[str]) -> None:
        """Move the schedulers that move at epochs.

        Args:
            seen: names of values that `after_validation` has got already. Each counts once.

        Raises:
            ConfigurationError: the values lack what a strict scheduler watches.
        """
        for plan, move in self._at_epochs if self.are_warm else ():
            if not plan.watches:
                move()
                continue
            names = self._names_for(plan)
            if (epoch + 1) % plan.frequency or any(name in seen for name in names):
                continue
            value = _value_in(values, names)
            if value is not None:
                plan.scheduler.step(value)
            elif not (VALIDATION_NAME.match(names[0]) and self._validates_later(epoch)):
                self._report_missing(plan, names[0], values)

    def watched_at_epochs(self) -> list[str]:
        """Return the names of the values that schedulers watch at the ends of epochs."""
        return [self._names_for(plan)[0] for plan, _ in self._at_epochs if plan.watches]

    def _validates_later(self, epoch: int) -> bool:
        """Whether there are validations, but none after this epoch."""
        arguments = self._arguments
        return bool(arguments.held_out) and not arguments.validates_after(epoch)

    def _names_for(self, plan: PlannedScheduler) -> tuple[str, str]:
        """Return the names, as callbacks' `monitor` has them, of what a scheduler watches at
        epochs.
        """
        watched = plan.monitor or ("val_loss" if self._arguments.held_out else "loss")
        return watched, f"{watched}_epoch"

    def _follow_step(self, plan: PlannedScheduler) -> None:
        """Every `frequency` updates, give a scheduler the last step's value over all ranks.

        Ranks:
            Collective; with several ranks, it takes one exchange.
        """
        plan.passed += 1
        if plan.passed % plan.frequency:
            return
        watched = plan.monitor or "loss"
        value, weight = self._logged_by_step(watched)
        if self._data_ranks.world_size > 1:
            # A rank whose batch was padding has no value.
            own = [0.0, 0.0] if value is None or not weight else [value * weight, weight]
            total, weight = self._data_ranks.sums(own)
            value = total / weight if weight else None
        if value is not None:
            plan.scheduler.step(value)
        else:
            self._report_missing(plan, watched, self._record.results())

    @property
    def _record(self) -> Logbook:
        """The values of the pass that this thread makes."""
        running = self._contexts.current
        assert running is not None
        return running.record  # type: ignore[return-value]

    def _logged_by_step(self, name: str) -> tuple[float | None, float]:
        """Return the last step's value of a name, and its weight in a mean over ranks.

        For the loss and logged values it is the step's; for a metric, the epoch's value so far.
        """
        logbook = self._record
        samples = float(logbook.samples)
        entries = logbook.logged.entries
        entry = entries.get(name, entries.get(name.removesuffix("_step")))
        if entry is not None and entry.latest is not None:
            return float(entry.latest), samples
        if name == "loss" and logbook.loss.last is not None:
            return float(logbook.loss.last), float(logbook.loss.last_count) if samples else 0.0
        value = logbook.results().get(name)
        return None if value is None else float(value), samples

    def _report_missing(self, plan: PlannedScheduler, watched: str, logs: Values) -> None:
        """Raise because the logs lack what a scheduler watches; if it isn't strict, warn once."""
        there = ", ".join(logs)
        if plan.monitor is not None:
            problem = f"lr_scheduler monitors {watched!r}, but the logs have {there}."
        else:
            problem = (
                f"ReduceLROnPlateau monitors {watched!r} unless lr_scheduler sets another "
                f'monitor, but the logs have {there}. Write lr_scheduler={{"scheduler": …, '
                '"monitor": …} with one of these.'
            )
        if plan.strict:
            raise ConfigurationError(problem)
        if plan not in self._warned_of:
            self._warned_of.append(plan)
            warn(f"{problem} The scheduler waits until the logs have it.")


def _warm_up_length(epochs: float | None, span: Span) -> int:
    """Return the updates of a warm-up of so many epochs.

    Raises:
        ConfigurationError: the number of updates in an epoch is unknown.
    """
    if not epochs:
        return 0
    whole = int(epochs)
    before, after = span.updates_before(whole), span.updates_before(whole + 1)
    if before is None or after is None:
        raise ConfigurationError(
            f"warmup_epochs={epochs} needs an epoch's length, but x has none. Give fit "
            "steps_per_epoch=…"
        )
    return max(1, round(before + (epochs - whole) * (after - before)))


def _part_of_training(part: float, span: Span) -> int:
    """Return the updates of a warm-up that is a part of the training. The last of them has the
    whole rate, so there are at least two; one update is left for the rest.

    Raises:
        ConfigurationError: the training's length is unknown.
    """
    updates = span.updates_before(span.epochs)
    if updates is None:
        raise ConfigurationError(
            f"A warm-up of {part:g} of the training needs its length, but x has none. Give fit "
            "steps_per_epoch=…",
            code="FK032",
        )
    return min(max(round(part * updates), 2), updates - 1)


def _value_in(logs: Values, names: tuple[str, ...]) -> float | None:
    return next((logs[name] for name in names if logs.get(name) is not None), None)


def schedulers_for(model: Module, span: Span, *, resumes: bool) -> list[PlannedScheduler]:
    """Return the schedulers of a fit, over the optimizers, which exist.

    A scheduler that gets its length from `fit` (`"cosine"`) is built again for each fit, and
    moved to where the fit begins. All others are built once and continue. They get the states
    of a checkpoint. So does one of `fit`'s length, if a training of that length is resumed.

    Args:
        span: the training's length, and where the fit begins.
        resumes: whether the fit resumes a saved training.
    """
    state, choice = model._fitkit.fit_state, model._fitkit.compilation.scheduler
    follows_fit = choice is not None and choice.follows_fit
    if choice is not None and (follows_fit or not state.schedulers):
        _make_schedulers(state, choice, span)
    if follows_fit and not (resumes and _has_stored_lengths(state)):
        state.stored_schedulers, state.stored_groups = [], []
        _move_to(state.schedulers, span)
    else:
        restore_schedulers(state)
    return state.schedulers


def _make_schedulers(state: FitState, choice: SchedulerChoice, span: Span) -> None:
    """Make one for each optimizer. An instance belongs to the optimizer it was made for."""
    if state.schedulers or (choice.follows_fit and state.stored_schedulers):
        for group in state.groups:
            put_rate(group, first_rate(group))
    state.schedulers = []
    for optimizer in choice.optimizers_among(state.optimizers):
        scheduler = choice.build(optimizer, span)
        state.schedulers.append(
            PlannedScheduler(
                scheduler,
                choice.interval or own_interval(scheduler),
                choice.frequency,
                monitor=choice.monitor,
                optimizer=optimizer,
                follows_fit=choice.follows_fit,
            )
        )


def _has_stored_lengths(state: FitState) -> bool:
    """Whether the schedulers are as long as those of the checkpoint."""
    stored = [entry["state"] for entry in state.stored_schedulers]
    return len(stored) == len(state.schedulers) and all(
        there.get(name) == getattr(plan.scheduler, name, None)
        for plan, there in zip(state.schedulers, stored, strict=True)
        for name in LENGTHS
    )


def _move_to(schedulers: list[PlannedScheduler], span: Span) -> None:
    """Move schedulers, which are new, to where a fit begins."""
    for plan in schedulers:
        # torch warns if a scheduler moves before its optimizer.
        plan.optimizer._opt_called = True  # type: ignore[union-attr]
        past, move = span.past(plan.interval), plan.stepper()
        for _ in range(past):
            move()
        plan.passed = past


def restore_schedulers(state: FitState) -> None:
    """Give schedulers the states from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has other schedulers.
    """
    stored, state.stored_schedulers = state.stored_schedulers, []
    groups, state.stored_groups = state.stored_groups, []
    if not stored or not state.schedulers:
        return
    wanted = [entry["class"] for entry in stored]
    classes = [type(plan.scheduler).__name__ for plan in state.schedulers]
    if wanted != classes:
        raise CheckpointError(
            f"The checkpoint has the schedulers {', '.join(wanted)}, but the model is compiled "
            f"with {', '.join(classes)}. Compile it as it was, or use load_weights."
        )
    for plan, entry in zip(state.schedulers, stored, strict=True):
        check_scheduler_state(plan.scheduler, entry["state"], "The checkpoint")
    for plan, entry in zip(state.schedulers, stored, strict=True):
        plan.load_state(entry["state"])
        plan.passed = entry.get("passed", 0)
    # Making a scheduler has reset the rates.
    for group, settings in zip(state.groups, groups, strict=True):
        put_back(group, settings)
