"""What `configure_optimizers` returned, in any of Lightning's shapes, as plain lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fitkit.arguments import check_choice, check_count, check_flag, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.schedulers import own_interval

SHAPES = (
    "configure_optimizers returns an optimizer, a list of optimizers, two lists (optimizers, "
    "schedulers), a dict with 'optimizer' and 'lr_scheduler', or a list of such dicts"
)
SCHEDULER_KEYS = (
    "scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau",
    "opt_idx",
)  # fmt: skip
LENGTHS = ("T_max", "total_steps", "total_iters", "_schedule_phases")
"""What a scheduler's state says of how long it takes."""
OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")


@dataclasses.dataclass
class PlannedScheduler:
    """A scheduler, and when it moves.

    Attributes:
        scheduler: the scheduler.
        interval: `"epoch"` or `"step"` (an update).
        frequency: it moves after every so many of these.
        monitor: the log that it watches; None for a scheduler that watches nothing.
        optimizer: whose rates it sets.
        strict: whether a monitored log that isn't there is an error; else it is told once.
        follows_fit: whether its length is the training's.
        passed: how many of its intervals are over; a checkpoint keeps it.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    optimizer: Optimizer | None = None
    strict: bool = True
    follows_fit: bool = False
    passed: int = 0

    @property
    def watches(self) -> bool:
        """Whether it needs a log's value."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def keeps_state(self) -> bool:
        """Whether a checkpoint can keep where the scheduler is."""
        names = ("state_dict", "load_state_dict")
        return all(callable(getattr(self.scheduler, name, None)) for name in names)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the scheduler."""
        return self.scheduler.state_dict() if self.keeps_state else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a stored state; a length that the fit has given anew stays."""
        if not self.keeps_state:
            return
        lengths = LENGTHS if self.follows_fit else ()
        own = {name: value for name, value in state.items() if name not in lengths}
        self.scheduler.load_state_dict(own)

    def mover(self) -> Callable[[], None]:
        """What to call after each of its intervals; each call counts one."""
        scheduler = self.scheduler
        # One with a fixed length (OneCycleLR) keeps its last rate after it.
        total = getattr(scheduler, "total_steps", None)
        if total is None and self.frequency == 1:
            step: Callable[[], None] = scheduler.step
            return step

        def move() -> None:
            self.passed += 1
            is_due = self.passed % self.frequency == 0
            if is_due and (total is None or scheduler.last_epoch + 1 < total):
                scheduler.step()

        return move


@dataclasses.dataclass
class OwnOptimizers:
    """The optimizers of `configure_optimizers`.

    Attributes:
        optimizers: in their order.
        schedulers: in theirs.
        frequencies: for how many batches in a row each optimizer is used; None for all each time.
    """

    optimizers: list[Optimizer]
    schedulers: list[PlannedScheduler]
    frequencies: list[int] | None = None


def read_optimizers(returned: Any) -> OwnOptimizers:
    """What `configure_optimizers` returned.

    Raises:
        ConfigurationError, ArgumentTypeError: none of the shapes.
    """
    if isinstance(returned, Optimizer):
        return OwnOptimizers([returned], [])
    if isinstance(returned, Mapping):
        return _of_dicts([returned])
    if isinstance(returned, (list, tuple)) and returned:
        if all(isinstance(entry, Optimizer) for entry in returned):
            return OwnOptimizers(list(returned), [])
        if all(isinstance(entry, Mapping) for entry in returned):
            return _of_dicts(list(returned))
        if len(returned) == 2 and all(isinstance(entry, (list, tuple)) for entry in returned):
            return _of_two_lists(*returned)
    raise ArgumentTypeError(f"configure_optimizers returned {describe(returned)}. {SHAPES}.")


def _of_two_lists(optimizers: Any, schedulers: Any) -> OwnOptimizers:
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    if not optimizers:
        raise ConfigurationError(f"configure_optimizers returned no optimizer. {SHAPES}.")
    planned = [_planned(given, list(optimizers), None) for given in schedulers]
    return OwnOptimizers(list(optimizers), planned)


def _of_dicts(dicts: list[Mapping[str, Any]]) -> OwnOptimizers:
    optimizers, schedulers, frequencies = [], [], []
    for given in dicts:
        unknown = set(given) - set(OPTIMIZER_KEYS)
        if unknown or "optimizer" not in given:
            raise ConfigurationError(
                f"configure_optimizers returned a dict with the keys {list(given)}; it has "
                f"'optimizer', and perhaps {', '.join(map(repr, OPTIMIZER_KEYS[1:]))}."
            )
        _check_optimizer(given["optimizer"])
        optimizers.append(given["optimizer"])
        if given.get("lr_scheduler") is not None:
            own = [given["optimizer"]]
            schedulers.append(_planned(given["lr_scheduler"], own, given.get("monitor")))
        if given.get("frequency") is not None:
            check_count("frequency", given["frequency"])
            frequencies.append(int(given["frequency"]))
    if frequencies and len(frequencies) != len(optimizers):
        raise ConfigurationError(
            "configure_optimizers gave some optimizers a 'frequency' and others none. Give one to "
            "each, or to none."
        )
    return OwnOptimizers(optimizers, schedulers, frequencies or None)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"configure_optimizers returned {describe(optimizer)} as an optimizer. {SHAPES}."
        )


def _planned(given: Any, optimizers: list[Optimizer], monitor: str | None) -> PlannedScheduler:
    options: dict[str, Any] = {"scheduler": given}
    if isinstance(given, Mapping):
        unknown = set(given) - set(SCHEDULER_KEYS)
        if unknown or "scheduler" not in given:
            raise ConfigurationError(
                f"configure_optimizers returned an lr_scheduler with the keys {list(given)}; it "
                f"has {', '.join(map(repr, SCHEDULER_KEYS))}."
            )
        options = dict(given)
    scheduler = options["scheduler"]
    if not isinstance(scheduler, LRScheduler) and not (
        callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, (type, Optimizer))
    ):
        raise ArgumentTypeError(
            f"configure_optimizers returned {describe(scheduler)} as a scheduler. Return a "
            "torch.optim.lr_scheduler object over one of the optimizers."
        )
    interval, frequency = options.get("interval"), options.get("frequency", 1)
    interval = own_interval(scheduler) if interval is None else interval
    check_choice("interval", interval, ("epoch", "step"))
    check_count("frequency", frequency)
    check_flag("strict", options.get("strict", True))
    optimizer = getattr(scheduler, "optimizer", optimizers[0])
    if not any(optimizer is known for known in optimizers):
        raise ConfigurationError(
            "configure_optimizers returned a scheduler over an optimizer that it didn't return. "
            "Return both."
        )
    planned = PlannedScheduler(
        scheduler,
        interval,
        int(frequency),
        options.get("monitor") or monitor,
        optimizer,
        strict=options.get("strict", True),
    )
    if not planned.keeps_state:
        warn(
            f"{type(scheduler).__name__} has no state_dict and load_state_dict, so checkpoints "
            "can't keep where it is: a resumed training begins it anew. Give it both."
        )
    if planned.watches and interval == "step":
        raise ConfigurationError(
            "ReduceLROnPlateau watches a value of an epoch; give it interval='epoch'."
        )
    return planned
