"""Exchanges between the copies of a callback on all ranks. A single rank exchanges nothing."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from fitkit.module import Module

Value = TypeVar("Value")


def from_rank_zero(model: Module, value: Value) -> Value:
    """Rank 0's value, so that every rank makes the same decision.

    Ranks:
        Collective.
    """
    given: Value = model._fitkit.compilation.strategy.collectives.broadcast(value)
    return given


def from_all_ranks(model: Module, value: Value) -> list[Value]:
    """Every rank's value, in rank order.

    Ranks:
        Collective.
    """
    found: list[Value] = model._fitkit.compilation.strategy.collectives.gather(value)
    return found


def share_buffers(model: Module) -> None:
    """Make the ranks' modules equal: weights that they hold separately, and buffers. Buffers are
    taken from rank 0, because running statistics differ between ranks that see other data.

    Ranks:
        Collective.
    """
    strategy = model._fitkit.compilation.strategy
    if strategy.engine is not None:
        strategy.engine.average_ranks()
    strategy.collectives.broadcast_tensors(list(model.buffers()))


def print_on_rank_zero(model: Module, text: str) -> None:
    """Print a line on rank 0 only."""
    if model.is_global_zero:
        print(text, flush=True)


def several_ranks(model: Module) -> bool:
    """Whether there are other ranks."""
    size: int = model._fitkit.compilation.strategy.collectives.world_size
    return size > 1


def any_rank(model: Module, flag: Any) -> bool:
    """Whether `flag` is true on some rank.

    Ranks:
        Collective.
    """
    return any(from_all_ranks(model, bool(flag)))


PERIOD_S = 0.05
"""About how long a flag may wait until the ranks compare theirs, in seconds."""
MOST_STEPS = 100
"""The most steps between two exchanges, even if the steps are short: they may become longer."""


class AnyRankFlag:
    """Tells all ranks at the same step that one of them has set a flag, by a signal or a clock.

    An exchange after every step would cost too much. So several steps pass between two exchanges:
    as many as rank 0 makes in a twentieth of a second.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a fit."""
        self._pause = self._left = 1
        self._asked_at = time.monotonic()

    def after_step(self, model: Module, flag: bool) -> bool:
        """Whether any rank's flag was set at an exchange. False in between.

        Ranks:
            Collective: after each step on each rank.
        """
        if not several_ranks(model):
            return flag
        self._left -= 1
        if self._left:
            return False
        answers = from_all_ranks(model, (flag, self._next_pause()))
        self._pause = self._left = answers[0][1]
        return any(flagged for flagged, _ in answers)

    def _next_pause(self) -> int:
        """The number of steps until the next exchange."""
        now = time.monotonic()
        step_s = max(now - self._asked_at, 1e-9) / self._pause
        self._asked_at = now
        return max(1, min(int(PERIOD_S / step_s), 2 * self._pause, MOST_STEPS))
