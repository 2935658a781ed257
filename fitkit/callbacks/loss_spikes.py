"""Noticing a loss that jumps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.batch_losses import BatchLosses
from fitkit.callbacks.ranks import from_all_ranks, say
from fitkit.callbacks.terminate_on_nan import NonFiniteError
from fitkit.errors import FitkitError, warn

NORMAL = 1.4826
"""A normal distribution's standard deviation, in median absolute deviations."""

LEAST_SPREAD = 0.01
"""Losses that hardly vary are taken to spread by this part of their median."""


class LossSpikeError(FitkitError, RuntimeError):
    """The loss of a batch is far above those before it."""


class DetectLossSpike(Callback):
    """Notices batches whose loss is far above the median of those before.

    A batch spikes where its loss exceeds the window's median by more than `threshold` times the
    window's spread (1.4826 median absolute deviations, the standard deviation of normal
    numbers), or isn't finite. Spikes don't enter the window. The device is asked every
    `check_every` batches only.

    Args:
        threshold: how many spreads. Default 10.
        window: batches to compare with; nothing is noticed before half of them. Default 50.
        patience: spikes in a row before the action. Default 1.
        action: `"warn"` (default; once a fit), `"stop"` the training or `"raise"`.
        check_every: batches between two looks. Default 10.

    Attributes:
        spikes: (epoch, batch, loss) of each, epochs and batches from 0.

    Ranks:
        Each rank looks at its own batches; they act together.

    Raises:
        LossSpikeError, NonFiniteError: from `fit`, with `"raise"`.
    """

    stops_alike = True

    def __init__(
        self,
        threshold: float = 10.0,
        window: int = 50,
        patience: int = 1,
        action: str = "warn",
        check_every: int = 10,
    ) -> None:
        check_number("threshold", threshold, above=0)
        check_count("window", window, minimum=4)
        check_count("patience", patience)
        check_choice("action", action, ("warn", "stop", "raise"))
        check_count("check_every", check_every)
        self.threshold = threshold
        self.window = window
        self.patience = patience
        self.action = action
        self.check_every = check_every
        self._reset()

    def _reset(self) -> None:
        self.spikes: list[tuple[int, int, float]] = []
        self._losses = BatchLosses()
        self._before: deque[float] = deque(maxlen=self.window)
        self._in_a_row = 0
        self._warned = False
        self._epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._losses.reset()
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._losses.add(batch, logs)
        if (batch + 1) % self.check_every == 0:
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self._check()

    def _check(self) -> None:
        found = None
        for batch, loss in self._losses.take():
            if not self._is_spike(loss):
                self._in_a_row = 0
                self._before.append(loss)
                continue
            self.spikes.append((self._epoch, batch, loss))
            self._in_a_row += 1
            if self._in_a_row >= self.patience and found is None:
                found = batch, loss
        for rank, finding in enumerate(from_all_ranks(self.model, found)):
            if finding is not None:
                self._act(rank, *finding)
                return

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._before) < self.window // 2:
            return False
        median = _median(self._before)
        deviation = _median(abs(value - median) for value in self._before)
        spread = max(NORMAL * deviation, LEAST_SPREAD * abs(median))
        return loss - median > self.threshold * spread

    def _act(self, rank: int, batch: int, loss: float) -> None:
        usual = _median(self._before) if self._before else math.nan
        where = f"epoch {self._epoch + 1}, batch {batch}, rank {rank}"
        finding = f"The loss jumped to {loss:.4g} ({where}); around {usual:.4g} was usual."
        if self.action == "raise":
            raise (LossSpikeError if math.isfinite(loss) else NonFiniteError)(finding)
        if self.action == "stop":
            say(self.model, f"{finding} Training stops.")
            self.model.stop_training = True
        elif not self._warned and self.model.is_global_zero:
            self._warned = True
            warn(finding)


def _median(values: Iterable[float]) -> float:
    from statistics import median  # with decimal and fractions: not for whoever only imports fitkit

    return median(values)
