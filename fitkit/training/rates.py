"""Learning rates for larger batches: scaling by the number of ranks, and a gradual warm-up.

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
"""How the rate grows with the number of ranks; None: not at all."""


def scale_rates(state: FitState, scaling: str | None, ranks: int) -> float:
    """Multiply the rates for a number of ranks, once; a later fit on others corrects them.

    Returns:
        The factor by which the rates are above those that the user set.
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
    """Raises the rates linearly over the first updates, to what they were when it was made.

    Update k of n has the rate `target * (start + (1 - start) * k / n)`. Schedulers wait until it is
    over. A rate that somebody sets meanwhile is the new target.

    Args:
        groups: the optimizers' parameter groups, whose rates it sets from now on.
        updates: how many updates it takes, n.
        start: the fraction of the rates that the rise begins at; no update has as little.
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
        """Whether the rates are what they were meant to be."""
        return self._done >= self._updates

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        self._follow()
        return {"done": self._done, "targets": [float(target) for target in self._targets]}

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._done = int(state["done"])
        self._targets = [float(target) for target in state["targets"]]
        self._set()

    def step(self) -> None:
        """Take note of an update."""
        if not self.is_over:
            self._follow()
            self._done += 1
            self._set()

    def end(self) -> None:
        """Give the groups the rates that were aimed at, where they aren't reached yet."""
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
        """Aim at the rates that somebody has set meanwhile."""
        for index, (group, last) in enumerate(zip(self._groups, self._last, strict=True)):
            if group["lr"] is not last:
                self._targets[index] = self._last[index] = group["lr"]


def warm_up(
    groups: list[dict[str, Any]], epochs: float | None, steps: int | None, factor: float
) -> WarmUp | None:
    """The warm-up that `warmup_epochs` asks for.

    Args:
        epochs: how long; None or 0 for none.
        steps: updates in an epoch; None where unknown.
        factor: by how much the rates were scaled: it begins at the unscaled ones (at 0 where
            nothing was scaled).

    Raises:
        ConfigurationError: the length of an epoch isn't known.
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
    """Make a function to call after each update: it moves the warm-up, after that the schedulers.

    None where nothing is to be moved.

    Args:
        moves: the schedulers' steps.
        leads: whether this optimizer's updates are those that the warm-up counts.
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
