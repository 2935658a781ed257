"""Learning-rate schedulers from names, classes, partials, factories and instances."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from fitkit.arguments import check_choice, check_count, check_number, describe, plain
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.optimizers import shown
from fitkit.registry import Registry


def _makes_scheduler(entry: Any) -> bool:
    """Whether an entry is a scheduler's class, or a function that may make one."""
    if isinstance(entry, type):
        return callable(getattr(entry, "step", None)) and not issubclass(entry, Optimizer)
    return callable(entry)


SCHEDULERS: Registry[Any] = Registry(
    "lr_scheduler",
    hint="Or give a class, a functools.partial, a factory or an instance.",
    group="fitkit.schedulers",
    accepts=_makes_scheduler,
    expected="a scheduler's class, or a function that makes one",
)
for _name, _class in vars(lr_scheduler).items():
    if (
        isinstance(_class, type)
        and issubclass(_class, lr_scheduler.LRScheduler)
        and _class is not lr_scheduler.LRScheduler
        and not _name.startswith("_")
    ):
        _short = _name.removesuffix("LR")
        SCHEDULERS.add(_name, _class, *([_short] if _short != _name else []))
SCHEDULERS.add("cosine", lr_scheduler.CosineAnnealingLR)
_home = "fitkit.extras.warm_schedules"
SCHEDULERS.promise(f"{_home}:WarmupCosine", "warmup_cosine")
SCHEDULERS.promise(f"{_home}:WarmupLinear", "warmup_linear")
SCHEDULERS.promise(f"{_home}:WarmupPolynomial", "warmup_polynomial")
SCHEDULERS.promise(f"{_home}:WarmupConstant", "warmup_constant")
SCHEDULERS.promise(f"{_home}:WarmupStableDecay", "warmup_stable_decay", "wsd")


VALIDATION_NAME = re.compile(r"val(id|idation)?([_/.\-]|$)")
"""The prefixes of names of a validation's values."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A training's length, and where a fit begins in it.

    Attributes:
        epochs: the epochs of the training.
        updates: the updates of an epoch; None if unknown.
        changes: the epochs from which on an epoch has other numbers of updates, and the numbers.
        warm_up: the updates of the warm-up. Schedulers wait for its end.
        epoch: how many epochs are over.
        update: how many updates are over in an epoch that was interrupted.
    """

    epochs: int
    updates: int | None = None
    warm_up: int = 0
    epoch: int = 0
    update: int = 0
    changes: tuple[tuple[int, int], ...] = ()

    def updates_before(self, epoch: int) -> int | None:
        """How many updates come before an epoch; None if that is unknown."""
        if self.updates is None:
            return None
        total, since, number = 0, 0, self.updates
        for first, changed in self.changes:
            if first >= epoch:
                break
            total, since, number = total + (first - since) * number, first, changed
        return total + (epoch - since) * number

    def moves(self, interval: str) -> int | None:
        """How often a scheduler can move in the whole training; None if that is unknown."""
        return self._moves(interval, self.epochs, 0)

    def past(self, interval: str) -> int:
        """How often it could before the fit."""
        return self._moves(interval, self.epoch, self.update) or 0

    def _moves(self, interval: str, epochs: int, updates: int) -> int | None:
        if interval == "epoch":
            # The first move is at the end of the epoch in which the warm-up ends.
            waits = 0
            while (self.updates_before(waits + 1) or self.warm_up) < self.warm_up:
                waits += 1
            return max(epochs - waits, 0)
        total = self.updates_before(epochs)
        return None if total is None else max(total + updates - self.warm_up, 0)


@dataclasses.dataclass(frozen=True)
class SchedulerChoice:
    """The `lr_scheduler` argument of `compile`.

    Attributes:
        given: a name, class, partial, factory `optimizer -> scheduler`, or instance.
        interval: `"epoch"` or `"step"` (each update of the optimizer). None if not given: by the
            scheduler's class (`own_interval`).
        monitor: the log that `ReduceLROnPlateau` watches. None for `val_loss` if there is a
            validation, else `loss`.
        frequency: it moves once in this many of its intervals.
        options: the words that the dict has for a schedule with its own warm-up.
    """

    given: Any
    interval: str | None = None
    monitor: str | None = None
    frequency: int = 1
    options: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def follows_fit(self) -> bool:
        """Whether it needs the training's length, which `fit` knows."""
        return bool(self._lengths_to_fill())

    @property
    def warmup_part(self) -> float:
        """The part of the training's updates that its own warm-up takes."""
        default = getattr(_maker(self.given), "warmup_part", 0.0) if self._words() else 0.0
        return self.options.get("warmup", default)

    def _words(self) -> tuple[str, ...]:
        return _words_of(self.given)

    @property
    def class_name(self) -> str | None:
        """The scheduler's class, if it is known before the scheduler is made."""
        maker = _maker(self.given)
        if isinstance(maker, type):
            return maker.__name__
        return type(maker).__name__ if _is_scheduler(maker) else None

    @classmethod
    def read(cls, value: Any) -> SchedulerChoice | None:
        """Parse `compile`'s argument. None stays None.

        Raises:
            ConfigurationError, ArgumentTypeError: the argument is invalid.
        """
        if value is None:
            return None
        options: dict[str, float] = {}
        if isinstance(value, dict):
            unknown = sorted(
                set(value) - {"scheduler", "interval", "frequency", "monitor"}, key=str
            )
            words = _words_of(value.get("scheduler"))
            if not set(unknown) <= set(words) or "scheduler" not in value:
                named = ["'scheduler' (which must be there)", "'interval'", "'frequency'"]
                named += ["'monitor'", *map(repr, words)]
                raise ConfigurationError(
                    f"lr_scheduler has the keys {list(value)}; it takes {', '.join(named[:-1])} "
                    f"and {named[-1]}.{_with_arguments(value.get('scheduler'), unknown)}"
                )
            given, monitor = value["scheduler"], value.get("monitor")
            interval, frequency = value.get("interval"), value.get("frequency", 1)
            options = {name: value[name] for name in unknown}
            options = {name: plain(option) for name, option in options.items()}
            check_number("lr_scheduler's warmup", options.get("warmup", 0.0), minimum=0, below=1)
        else:
            given, monitor, interval, frequency = value, None, None, 1
        frequency = check_count("lr_scheduler's frequency", frequency)
        check_choice("lr_scheduler's interval", interval, (None, "epoch", "step"))
        if monitor is not None and not isinstance(monitor, str):
            raise ArgumentTypeError(f"lr_scheduler's monitor={monitor!r} must be a name.")
        _check_kind(given)
        check_watched(interval, monitor)
        choice = cls(given, interval, monitor, frequency, options)
        if options:  # a wrong word is told now
            choice.build(Optimizer([torch.zeros(1)], {"lr": 1.0}), Span(2, 1))
        return choice

    def optimizers_among(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Return the optimizers that get a scheduler: all, or the one that an instance was made
        for.
        """
        own = getattr(self.given, "optimizer", None) if _is_scheduler(self.given) else None
        found = [optimizer for optimizer in optimizers if optimizer is own]
        return found or (optimizers if own is None else optimizers[:1])

    def build(self, optimizer: Optimizer, span: Span) -> Any:
        """Return the scheduler over `optimizer`, at its beginning.

        Raises:
            ConfigurationError: an instance over another optimizer, or missing arguments.
        """
        if _is_scheduler(self.given):
            return _over(optimizer, self.given)
        maker = SCHEDULERS[self.given] if isinstance(self.given, str) else self.given
        length = span.moves(self.interval or own_interval(_maker(self.given)))
        if length is not None:
            length = max(length // self.frequency, 1)
        options = self._options(optimizer, length) if self.follows_fit else {}
        options.update((name, self.options[name]) for name in self.options if name != "warmup")
        try:
            scheduler = maker(optimizer, **options)
        except (ArgumentTypeError, ConfigurationError):  # of a schedule's word
            raise
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"lr_scheduler={shown(self.given)} could not be made: {error}. Give its "
                f"arguments with functools.partial({_class_name(_maker(self.given))}, …)."
            ) from error
        if not _is_scheduler(scheduler):
            raise ArgumentTypeError(
                f"lr_scheduler={shown(self.given)} gave a {type(scheduler).__name__}, not a "
                "scheduler."
            )
        check_step(scheduler)
        return _over(optimizer, scheduler)

    def trial(self, optimizer: Optimizer, settings: list[dict[str, Any]]) -> Any:
        """Return a scheduler like that of `build`, over an optimizer that nobody uses.

        Args:
            optimizer: the optimizer to imitate.
            settings: the settings of its groups.

        Returns:
            The scheduler, or None if making or moving it would run the user's code.
        """
        maker = _maker(self.given)
        bound = isinstance(self.given, functools.partial)
        arguments = [*self.given.args, *self.given.keywords.values()] if bound else []
        by_torch = isinstance(maker, type) and maker.__module__ == lr_scheduler.__name__
        if not by_torch or any(map(callable, arguments)):
            return None
        groups = [{**copy.deepcopy(group), "params": [torch.zeros(1)]} for group in settings]
        try:
            return self.build(Optimizer(groups, dict(optimizer.defaults)), Span(2, 1))
        except Exception:  # it needs an optimizer of another kind
            return None

    def _lengths_to_fill(self) -> list[str]:
        """Return the arguments that give the scheduler's length, where nobody has given it."""
        maker = _maker(self.given)
        if isinstance(self.given, str):
            return _lengths_of(maker)
        if not isinstance(maker, type):
            return []
        given = self._keywords()
        if issubclass(maker, lr_scheduler.OneCycleLR):
            return [] if {"total_steps", "epochs"} & set(given) else ["total_steps"]
        accepted = inspect.signature(maker).parameters
        return [
            name
            for name in _lengths_of(maker)
            if name not in given and accepted[name].default is inspect.Parameter.empty
        ]

    def _keywords(self) -> dict[str, Any]:
        """Return the arguments that a partial gives by name."""
        return self.given.keywords if isinstance(self.given, functools.partial) else {}

    def _options(self, optimizer: Optimizer, length: int | None) -> dict[str, Any]:
        """Return the arguments that depend on the training's length."""
        if length is None:
            raise ConfigurationError(
                f"lr_scheduler={shown(self.given)} needs the training's length, but x has no "
                "length. Give fit steps_per_epoch=…, or give the scheduler with its arguments.",
                code="FK032",
            )
        options: dict[str, Any] = dict.fromkeys(self._lengths_to_fill(), length)
        if _maker(self.given) is lr_scheduler.OneCycleLR and "max_lr" not in self._keywords():
            options["max_lr"] = [float(group["lr"]) for group in optimizer.param_groups]
        return options


def _words_of(given: Any) -> tuple[str, ...]:
    """Return the words that a dict may have beside the name of a schedule with its own warm-up."""
    words = getattr(SCHEDULERS[given], "in_words", ()) if isinstance(given, str) else ()
    return words if isinstance(words, tuple) else ()


def _with_arguments(given: Any, names: list[str]) -> str:
    """Return what to write for arguments that the class behind a name takes."""
    maker = SCHEDULERS[given] if isinstance(given, str) else given
    if not isinstance(maker, type) or not set(names) <= {*inspect.signature(maker).parameters}:
        return ""
    arguments = ", ".join(f"{name}=…" for name in names)
    return f" For the scheduler's own, write functools.partial({maker.__name__}, {arguments})."


def _over(optimizer: Optimizer, scheduler: Any) -> Any:
    """Return the scheduler, if it moves this optimizer's rates.

    Raises:
        ConfigurationError: it was made for another one, perhaps of another model.
    """
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError(
            "The lr_scheduler instance belongs to another optimizer than this model's. Give "
            "compile both instances, or the scheduler's class."
        )
    return scheduler


def _lengths_of(maker: Any) -> list[str]:
    """Return the arguments of a scheduler that give the training's length."""
    # total_iters of LinearLR and ConstantLR defaults to a warmup of a few steps, so it isn't one.
    accepted = inspect.signature(maker).parameters
    whole = ("T_max", "total_steps", "total_updates")
    names = [name for name in whole if name in accepted]
    return [*names, "total_iters"] if maker is lr_scheduler.PolynomialLR else names


def _check_kind(given: Any) -> None:
    """Refuse what can't be a scheduler, and names whose class needs arguments."""
    if isinstance(given, str):
        maker = SCHEDULERS[given]
        known = {*_lengths_of(maker), "optimizer", "max_lr" if _lengths_of(maker) else ""}
        missing = [
            item.name
            for item in inspect.signature(maker).parameters.values()
            if item.default is inspect.Parameter.empty and item.name not in known
        ]
        if missing:
            raise ConfigurationError(
                f"lr_scheduler={describe(given)} needs {' and '.join(missing)}. Give them with "
                f"functools.partial({_class_name(maker)}, {missing[0]}=…)."
            )
    elif isinstance(given, type) and not callable(getattr(given, "step", None)):
        raise ArgumentTypeError(f"lr_scheduler={given.__name__} is a class, but no scheduler.")
    elif isinstance(given, type) and issubclass(given, Optimizer):
        raise ArgumentTypeError(f"lr_scheduler={given.__name__} is an optimizer's class.")
    elif not (callable(given) or _is_scheduler(given)):
        raise ArgumentTypeError(
            f"lr_scheduler={describe(given)} must be a name, a class, a functools.partial, a "
            "factory optimizer -> scheduler, or an instance."
        )
    maker = _maker(given)
    if isinstance(maker, type) or _is_scheduler(maker):
        check_step(maker)


def _maker(given: Any) -> Any:
    """Return the class behind a name, a partial or a class. Other values are returned as they
    are.
    """
    if isinstance(given, str):
        return SCHEDULERS[given]
    return given.func if isinstance(given, functools.partial) else given


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, lr_scheduler.LRScheduler) or (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and callable(getattr(value, "state_dict", None))
    )


COUNTS = ("epoch", "num_updates", "step", "steps", "iteration", "t")
"""How libraries call the number that their schedulers' `step` takes."""


def step_of(scheduler: Any, interval: str) -> tuple[Callable[..., Any], bool]:
    """Return the method that moves a scheduler, and whether it takes the number of the intervals so
    far.

    Other libraries' schedulers (timm's) compute the rate from that number. They may have a method
    of its own for updates, `step_update`.
    """
    step = scheduler.step
    if interval == "step" and callable(getattr(scheduler, "step_update", None)):
        step = scheduler.step_update
    return step, bool(_required(step))


def check_step(scheduler: Any) -> None:
    """Refuse a scheduler, or a scheduler's class, whose `step` needs something else than a number.

    Raises:
        ConfigurationError: with what it needs.
    """
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    step = getattr(scheduler, "step", None)
    if not callable(step) or issubclass(kind, (lr_scheduler.ReduceLROnPlateau, Optimizer)):
        return
    needs = _required(step)[1 if scheduler is kind else 0 :]
    if len(needs) > 1 or any(name not in COUNTS for name in needs):
        raise ConfigurationError(
            f"lr_scheduler={kind.__name__} has step({', '.join(needs)}), but fitkit calls step() "
            "or step(epoch). Call it yourself: give callbacks a "
            "fitkit.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: …)."
        )


def _required(step: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a method can't be called without."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C, or a wrapper without a signature
        return []
    spread = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in spread]


def check_watched(interval: str | None, monitor: str | None) -> None:
    """Refuse a scheduler that moves at each update but watches a value of the epoch.

    Raises:
        ConfigurationError: with what to write.
    """
    if interval == "step" and monitor is not None and VALIDATION_NAME.match(monitor):
        raise ConfigurationError(
            f"lr_scheduler has interval='step', but monitor={monitor!r} is a value of the "
            "validation, which updates don't have. Write interval='epoch', or monitor a value of "
            "the training's steps ('loss', or what training_step logs)."
        )


def own_interval(scheduler: Any) -> str:
    """Return the default interval of a scheduler (or of what makes one).

    OneCycleLR and CyclicLR count updates by design, others if they say so (timm's, and fitkit's
    own). The rest counts epochs by convention.
    """
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    by_updates = issubclass(kind, (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR))
    by_updates = by_updates or getattr(scheduler, "t_in_epochs", True) is False
    return "step" if by_updates else "epoch"


def _class_name(maker: Callable[..., Any]) -> str:
    return getattr(maker, "__qualname__", type(maker).__name__)


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
        return isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)

    @property
    def keeps_state(self) -> bool:
        """Whether a checkpoint can keep the scheduler's position."""
        names = ("state_dict", "load_state_dict")
        return all(callable(getattr(self.scheduler, name, None)) for name in names)

    def state(self) -> dict[str, Any]:
        """Return the scheduler's part of a checkpoint."""
        return self.scheduler.state_dict() if self.keeps_state else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state."""
        if self.keeps_state:
            self.scheduler.load_state_dict(state)

    def stepper(self) -> Callable[[], None]:
        """Return the function to call after each of its intervals. Each call counts one."""
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
