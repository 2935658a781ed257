"""Learning rates for larger batches: scaling by the number of ranks, and a gradual warmup.

Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
arXiv:1706.02677.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fitkit.errors import ConfigurationError
from fitkit.training.optimizing import FitState

SCALINGS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
"""How the rate grows with the number of ranks. None: not at all."""


def scale_rates(state: FitState, scaling: str | None, ranks: int) -> float:
    """Multiply the rates for a number of ranks, once. A later fit with another number corrects it.

    Returns:
        The factor between the rates and those that the user set.
    """
    factor = 1.0 if scaling is None else SCALINGS[scaling](ranks)
    change = factor / state.rate_factor
    if change != 1.0:
        for group in state.groups:
            group["lr"] *= change
            if "initial_lr" in group:
                group["initial_lr"] *= change
    state.rate_factor = factor
    return factor


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
