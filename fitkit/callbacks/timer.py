"""A limit on how long a training may take."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fitkit.arguments import check_choice, check_flag, describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.ranks import from_rank_zero, say, several_ranks
from fitkit.errors import ArgumentTypeError, ConfigurationError

LONGEST_GAP_S = 1.0
"""On several ranks, how often rank 0's clock is asked."""

WRITTEN = re.compile(r"(\d+):(\d+):(\d+):(\d+)")


class Timer(Callback):
    """Ends `fit` after a time, and tells how long it took.

    Args:
        duration: how long: `"DD:HH:MM:SS"`, a `timedelta`, or a dict of its arguments
            (`{"hours": 8}`). None (default) only measures.
        interval: `"step"` (default) stops after the batch in which time runs out (on several
            ranks up to a second later, since they ask each other), `"epoch"` after the epoch.
        verbose: whether to say that time ran out. Default True.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be.

    Ranks:
        Rank 0's clock counts.
    """

    stops_alike = True

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        check_choice("interval", interval, ("step", "epoch"))
        check_flag("verbose", verbose)
        self.duration_s = None if duration is None else seconds_of(duration)
        self.interval = interval
        self.verbose = verbose
        self._clock = time.monotonic
        self._before_s = 0.0
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._steps = 0
        self._due = 0
        self._said = False

    def time_elapsed(self) -> float:
        """Seconds that the last (or present) fit took, with those before a checkpoint."""
        if self._began_s is None:
            return self._before_s
        end = self._clock() if self._ended_s is None else self._ended_s
        return self._before_s + end - self._began_s

    def time_remaining(self) -> float | None:
        """Seconds until the limit, at least 0; None where there is none."""
        if self.duration_s is None:
            return None
        return max(self.duration_s - self.time_elapsed(), 0.0)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before_s = 0.0
        self._began_s, self._ended_s = self._clock(), None
        self._steps = self._due = 0
        self._said = False

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._steps += 1
        if self.duration_s is None or self.interval != "step" or self._steps < self._due:
            return
        is_over, wait = from_rank_zero(self.model, (self._is_over(), self._gap()))
        self._due = self._steps + wait
        if is_over:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.duration_s is not None and from_rank_zero(self.model, self._is_over()):
            self._stop()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._ended_s = self._clock()

    def _is_over(self) -> bool:
        return self.time_remaining() == 0.0

    def _gap(self) -> int:
        """Steps until the clock is asked again: each on one rank, a second's on several."""
        if not several_ranks(self.model):
            return 1
        elapsed, remaining = self.time_elapsed() - self._before_s, self.time_remaining() or 0.0
        steps_per_s = self._steps / max(elapsed, 1e-9)
        return max(1, int(steps_per_s * min(LONGEST_GAP_S, remaining)))

    def _stop(self) -> None:
        self.model.stop_training = True
        if self.verbose and not self._said:
            self._said = True
            limit = timedelta(seconds=self.duration_s or 0.0)
            say(self.model, f"The time limit of {limit} is over; training ends.")

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed_s": self.time_elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before_s = float(state["time_elapsed_s"])


def seconds_of(duration: object) -> float:
    """A duration in seconds.

    Raises:
        ConfigurationError, ArgumentTypeError: nothing that is one, or none above 0.
    """
    if isinstance(duration, str):
        found = WRITTEN.fullmatch(duration.strip())
        if found is None:
            raise ConfigurationError(f"duration={duration!r} must be written 'DD:HH:MM:SS'.")
        days, hours, minutes, seconds = map(int, found.groups())
        length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(duration, timedelta):
        length = duration
    elif isinstance(duration, Mapping):
        try:
            length = timedelta(**duration)
        except TypeError as error:
            raise ConfigurationError(
                f"duration={describe(duration)} isn't what timedelta takes: {error}"
            ) from None
    else:
        raise ArgumentTypeError(
            f"duration={describe(duration)} must be 'DD:HH:MM:SS', a timedelta, or a dict such "
            "as {'hours': 8}."
        )
    if length <= timedelta(0):
        raise ConfigurationError(f"duration={describe(duration)} must be more than 0 seconds.")
    return length.total_seconds()
