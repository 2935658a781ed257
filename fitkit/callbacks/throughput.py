"""How fast a training goes."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from fitkit.arguments import check_count, describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.errors import ArgumentTypeError


class ThroughputMonitor(Callback):
    """Adds `batches_per_sec` and `samples_per_sec` to the epoch's logs.

    Over the epoch's last steps on all ranks together, without the first (which compiles and
    warms up) and without the validation. An epoch of one step has none.

    Args:
        window_size: at most so many steps. Default 100.
        separator: what joins the names to `prefix`. Default `"/"`.
        prefix: what the names begin with: `"train"` gives `train/batches_per_sec`. Default `""`.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be.
    """

    stops_alike = True

    def __init__(self, window_size: int = 100, separator: str = "/", prefix: str = "") -> None:
        check_count("window_size", window_size, minimum=2)
        for name, value in (("separator", separator), ("prefix", prefix)):
            if not isinstance(value, str):
                raise ArgumentTypeError(f"{name}={describe(value)} must be a string.")
        self.window_size = window_size
        self.separator = separator
        self.prefix = prefix
        self._clock = time.monotonic
        self._ends: deque[float] = deque(maxlen=window_size + 1)
        self._end_s: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._ends.clear()
        self._end_s = None

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._ends.append(self._clock())

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._note_end()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._note_end()
        if len(self._ends) < 2 or self._end_s is None or self._end_s <= self._ends[0]:
            return
        groups = (len(self._ends) - 1) / (self._end_s - self._ends[0])
        batches = groups * self.params.get("steps_per_execution", 1)
        logs[self._name("batches_per_sec")] = batches * self.model.world_size
        samples = self._samples_in_a_step()
        if samples is not None:
            logs[self._name("samples_per_sec")] = batches * samples

    def _note_end(self) -> None:
        # A GPU works behind the loop; by now its losses were read, so it has caught up.
        if self._end_s is None:
            self._end_s = self._clock()

    def _samples_in_a_step(self) -> float | None:
        samples, steps = self.params.get("samples"), self.params.get("steps")
        if samples and steps:
            return float(samples) / steps
        return self.model.effective_batch_size

    def _name(self, name: str) -> str:
        return f"{self.prefix}{self.separator}{name}" if self.prefix else name
