"""Learning rates for larger batches: scaling by the number of ranks, and a gradual warmup.

Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
arXiv:1706.02677.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fitkit.errors import ConfigurationError

SCALINGS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
"""How the rate grows with the number of ranks. None: not at all."""


LENGTHS = ("T_max", "total_steps", "total_iters", "_schedule_phases")
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
        """Continue from a stored state. A length that the fit has set stays."""
        if not self.keeps_state:
            return
        lengths = LENGTHS if self.follows_fit else ()
        kept = {name: value for name, value in state.items() if name not in lengths}
        self.scheduler.load_state_dict(kept)

    def stepper(self) -> Callable[[], None]:
        """The function to call after each of its intervals. Each call counts one."""
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


class WarmUp:
    """Raises the rates linearly over the first updates, up to their values when it was created.

    Update k of n has the rate `target * (start + (1 - start) * k / n)`. Schedulers wait until the
    warmup is over. If other code sets a rate during it, that is the new target.

    Args:
        groups: the optimizers' parameter groups, whose rates it sets from now on.
        updates: the number of updates, n.
        start: the fraction of the rates at the start. No update has a rate that low.
    """

    def __init__(self, groups: list[dict[str, Any]], updates: int, start: float) -> None:
        self._groups = groups
        self._targets = [group["lr"] for group in groups]
        self._updates = updates
        self._start = start
        self._done = 0
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

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._done = int(state["done"])
        self._targets = [float(target) for target in state["targets"]]
        self._set()

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


def warm_up(
    groups: list[dict[str, Any]], epochs: float | None, steps: int | None, factor: float
) -> WarmUp | None:
    """The warmup for `warmup_epochs`.

    Args:
        epochs: its length; None or 0 for none.
        steps: updates per epoch; None if unknown.
        factor: the factor by which the rates were scaled. The warmup starts at the unscaled rates
            (at 0 if nothing was scaled).

    Raises:
        ConfigurationError: the length of an epoch is unknown.
    """
    if not epochs:
        return None
    if steps is None:
        raise ConfigurationError(
            f"warmup_epochs={epochs} needs an epoch's length, but x has none. Give fit "
            "steps_per_epoch=…"
        )
    start = 1.0 / factor if factor != 1.0 else 0.0
    return WarmUp(groups, max(1, round(epochs * steps)), start)


def after_update(
    warm: WarmUp | None, moves: list[Callable[[], Any]], *, leads: bool = True
) -> Callable[[], Any] | None:
    """Make a function to call after each update. It moves the warmup, then the schedulers.

    None if nothing moves.

    Args:
        moves: the schedulers' steps.
        leads: whether the warmup counts this optimizer's updates.
    """
    if warm is None and len(moves) <= 1:
        return moves[0] if moves else None

    def step() -> None:
        if warm is not None and not warm.is_over:
            if leads:
                warm.step()
            return
        for move in moves:
            move()

    return step
