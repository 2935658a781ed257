"""How the learning rates move during a fit: a gradual warmup, then the schedulers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError, warn
from fitkit.module import Module
from fitkit.optimizers import members_of
from fitkit.schedulers import VALIDATION_NAME, Span, step_of
from fitkit.training.own_step import Step
from fitkit.training.settings import FitArguments

SCALINGS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
"""How the rate grows with the number of ranks. None: not at all."""


LENGTHS = ("T_max", "total_steps", "total_iters")
"""The entries of a scheduler's state that give its length."""


@dataclasses.dataclass
class PlannedScheduler:
    """A scheduler, and when it moves.

    Attributes:
        scheduler: the scheduler.
        interval: `"epoch"` or `"step"` (an update).
        frequency: it moves once in this many intervals.
        monitor: the log that it watches; None if it watches nothing.
        optimizer: the optimizer whose rates it sets.
        strict: whether a missing monitored log is an error. If not, there is one warning.
        follows_fit: whether its length is the training's.
        name: the name that LearningRateMonitor gives its rates; None for `learning_rate`.
        passed: how many of its intervals are over. A checkpoint keeps it.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    optimizer: Optimizer | None = None
    strict: bool = True
    follows_fit: bool = False
    name: str | None = None
    passed: int = 0

    @property
    def watches(self) -> bool:
        """Whether it needs a log's value."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def keeps_state(self) -> bool:
        """Whether a checkpoint can keep the scheduler's position."""
        names = ("state_dict", "load_state_dict")
        return all(callable(getattr(self.scheduler, name, None)) for name in names)

    def state(self) -> dict[str, Any]:
        """The scheduler's part of a checkpoint."""
        return self.scheduler.state_dict() if self.keeps_state else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state."""
        if self.keeps_state:
            self.scheduler.load_state_dict(state)

    def stepper(self) -> Callable[[], None]:
        """The function to call after each of its intervals. Each call counts one."""
        scheduler = self.scheduler
        # One with a fixed length (OneCycleLR) keeps its last rate after it.
        total = getattr(scheduler, "total_steps", None)
        step, takes_number = step_of(scheduler, self.interval)
        if total is None and self.frequency == 1 and not takes_number:
            return step

        def move() -> None:
            self.passed += 1
            is_due = self.passed % self.frequency == 0
            if is_due and takes_number:
                step(self.passed // self.frequency)
            elif is_due and (total is None or scheduler.last_epoch + 1 < total):
                step()

        return move


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

    def __init__(
        self, groups: list[dict[str, Any]], updates: int, start: float, done: int = 0
    ) -> None:
        self._groups = groups
        self._targets = [group["lr"] for group in groups]
        self._updates = updates
        self._start = start
        self._done = done
        self._last: list[Any] = []
        self._set()

    @property
    def is_over(self) -> bool:
        """Whether the rates have reached their targets."""
        return self._done >= self._updates

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        self._follow()
        return {"done": self._done, "targets": [float(target) for target in self._targets]}

    def step(self) -> None:
        """Record an update."""
        if not self.is_over:
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
        step: computes the batches, and records their values.
        updates: the number of updates in an epoch; None if unknown.
        before: the number of updates that were made before in the first epoch.
    """

    def __init__(
        self,
        model: Module,
        arguments: FitArguments,
        step: Step,
        updates: int | None,
        before: int = 0,
    ) -> None:
        compilation, state = model._fitkit.compilation, model._fitkit.fit_state
        self._arguments = arguments
        self._step = step
        self._data_ranks: Collectives = compilation.strategy.data_ranks
        factor = state.scale_rates(compilation.scale_lr, self._data_ranks.world_size)
        resumed = arguments.resumed
        length = _warm_up_length(compilation.warmup_epochs, updates)
        done = arguments.initial_epoch * (updates or 0) + before
        if resumed is not None and resumed.warm_up is not None:
            done = round(resumed.warm_up["done"] * resumed.shares / self._data_ranks.world_size)
        elif resumed is not None:  # it is over, or never was
            length = min(length, done)
        span = Span(arguments.epochs, updates, length, arguments.initial_epoch, before)
        self._schedulers: list[PlannedScheduler] = state.schedulers_for(
            model, span, resumes=resumed is not None
        )
        self._warm_up: WarmUp | None = None
        if done < length:
            # It starts at the unscaled rates; at 0 if nothing was scaled.
            start = 1.0 / factor if factor != 1.0 else 0.0
            self._warm_up = WarmUp(state.groups, length, start, done)
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

    def state(self) -> dict[str, Any] | None:
        """The warmup's part of a checkpoint. None if it is over, since schedulers move the rates
        then."""
        return None if self._warm_up is None or self._warm_up.is_over else self._warm_up.state()

    def end(self) -> None:
        """Set the rates to the warmup's targets, if it isn't over."""
        if self._warm_up is not None:
            self._warm_up.end()

    @property
    def read_steps(self) -> bool:
        """Whether a scheduler needs a step's value before the next step."""
        return any(plan.watches and plan.interval == "step" for plan in self._schedulers)

    def after_update_of(self, optimizer: Optimizer) -> Callable[[], Any] | None:
        """The function to call after each update of an optimizer; None if nothing moves."""
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

    def after_validation(self, epoch: int, values: dict[str, Any]) -> None:
        """Move the schedulers that watch a value of a validation within an epoch."""
        for plan, _ in self._at_epochs if self.are_warm else ():
            if plan.watches and (epoch + 1) % plan.frequency == 0:
                value = _value_in(values, self._names_for(plan))
                if value is not None:
                    plan.scheduler.step(value)

    def after_epoch(self, epoch: int, values: dict[str, Any], seen: Collection[str]) -> None:
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
        """The names of the values that schedulers watch at the ends of epochs."""
        return [self._names_for(plan)[0] for plan, _ in self._at_epochs if plan.watches]

    def _validates_later(self, epoch: int) -> bool:
        """Whether there are validations, but none after this epoch."""
        arguments = self._arguments
        return arguments.held_out is not None and not arguments.validates_after(epoch)

    def _names_for(self, plan: PlannedScheduler) -> tuple[str, str]:
        """The names, as callbacks' `monitor` has them, of what a scheduler watches at epochs."""
        watched = plan.monitor or ("loss" if self._arguments.held_out is None else "val_loss")
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
            self._report_missing(plan, watched, self._step.logbook.results())

    def _logged_by_step(self, name: str) -> tuple[float | None, float]:
        """The last step's value of a name, and its weight in a mean over ranks.

        For the loss and logged values it is the step's; for a metric, the epoch's value so far.
        """
        logbook = self._step.logbook
        samples = float(logbook.samples)
        entries = logbook.logged.entries
        entry = entries.get(name, entries.get(name.removesuffix("_step")))
        if entry is not None and entry.latest is not None:
            return float(entry.latest), samples
        if name == "loss" and logbook.loss.last is not None:
            return float(logbook.loss.last), float(logbook.loss.last_count) if samples else 0.0
        value = logbook.results().get(name)
        return None if value is None else float(value), samples

    def _report_missing(self, plan: PlannedScheduler, watched: str, logs: dict[str, Any]) -> None:
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


def _warm_up_length(epochs: float | None, updates: int | None) -> int:
    """The updates of a warm-up of so many epochs.

    Raises:
        ConfigurationError: the number of updates in an epoch is unknown.
    """
    if not epochs:
        return 0
    if updates is None:
        raise ConfigurationError(
            f"warmup_epochs={epochs} needs an epoch's length, but x has none. Give fit "
            "steps_per_epoch=…"
        )
    return max(1, round(epochs * updates))


def _value_in(logs: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((logs[name] for name in names if logs.get(name) is not None), None)
