"""What some rank wants, asked now and then, at steps that are the same on all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fitkit.callbacks.ranks import from_all_ranks, several_ranks

if TYPE_CHECKING:
    from fitkit.model import Model

PERIOD_S = 0.05
"""About how long a wish may wait."""
MOST_STEPS = 100
"""Between two questions, however short the steps are: they may become longer."""


class Wishes:
    """Wishes that come to single ranks (a signal, a clock) and need a step of all.

    To ask after every step would cost an exchange each time; so several steps pass between two
    questions, as many as rank 0 makes in a twentieth of a second.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A fit begins."""
        self._pause = self._left = 1
        self._asked_at = time.monotonic()

    def after_step(self, model: Model, wish: bool) -> bool:
        """Whether some rank had a wish when the ranks asked each other; False in between.

        Ranks:
            Collective: after each step on each rank.
        """
        if not several_ranks(model):
            return wish
        self._left -= 1
        if self._left:
            return False
        answers = from_all_ranks(model, (wish, self._next_pause()))
        self._pause = self._left = answers[0][1]
        return any(wanted for wanted, _ in answers)

    def _next_pause(self) -> int:
        """How many steps to wait until the next question."""
        now = time.monotonic()
        step_s = max(now - self._asked_at, 1e-9) / self._pause
        self._asked_at = now
        return max(1, min(int(PERIOD_S / step_s), 2 * self._pause, MOST_STEPS))
