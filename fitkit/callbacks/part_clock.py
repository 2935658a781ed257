"""A clock that always runs for exactly one part of the work, so that parts add up to the whole."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

REST = "rest"
LONGEST_QUEUE = 512
"""CUDA events that may wait to be read; beyond, those that have come are."""


class PartClock:
    """Seconds by part of the work.

    Args:
        device: whose time counts. On a GPU the marks are CUDA events, which the GPU reaches in its
            own time: nobody waits for it, and what it does while the host waits for data counts
            as its work. Elsewhere marks are times of the host's clock.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._marks: Marks = HostMarks()
        if device is not None and device.type == "cuda":
            self._marks = EventMarks(device)
        self._thread = threading.get_ident()
        self.part = REST

    def switch(self, part: str) -> str:
        """Let the time from now on count for `part`; the part for which it counted before."""
        before, self.part = self.part, part
        self._marks.mark(before)
        return before

    def around(
        self, function: Callable[..., Any], part: str, then: str | None = None
    ) -> Callable[..., Any]:
        """`function`, whose time counts for `part`.

        Args:
            part: what the time counts for; what is timed within by itself doesn't.
            then: what the time after the call counts for, by default the same as before.
        """

        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:  # replicas compute in threads
                return function(*arguments, **options)
            before = self.switch(part)
            try:
                return function(*arguments, **options)
            finally:
                self.switch(then or before)

        return timed

    def waiting(self, entries: Iterator[Any], part: str) -> Iterator[Any]:
        """The entries of an iterator; the time until each comes counts for `part`."""
        while True:
            before = self.switch(part)
            try:
                entry = next(entries)
            except StopIteration:
                return
            finally:
                self.switch(before)
            yield entry

    def take(self) -> dict[str, float]:
        """The seconds by part since the last time; on a GPU this waits for it."""
        self.switch(self.part)
        return self._marks.take()


class Marks:
    """Moments between parts."""

    def mark(self, part: str) -> None:
        """What has passed since the last moment was for `part`."""
        raise NotImplementedError

    def take(self) -> dict[str, float]:
        """The seconds by part since the last time."""
        raise NotImplementedError


class HostMarks(Marks):
    """Times of the host's clock."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        found, self._seconds = self._seconds, {}
        return found


class EventMarks(Marks):
    """CUDA events in a GPU's current stream; their distances are read once it has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []
        self._queue: deque[tuple[str, Any]] = deque()  # parts, and the events that end them
        self._seconds: dict[str, float] = {}
        self._since = self._recorded()

    def mark(self, part: str) -> None:
        self._queue.append((part, self._recorded()))
        if len(self._queue) > LONGEST_QUEUE:
            while len(self._queue) > 1 and self._queue[0][1].query():
                self._read()

    def take(self) -> dict[str, float]:
        self._queue[-1][1].synchronize()
        while self._queue:
            self._read()
        found, self._seconds = self._seconds, {}
        return found

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        """Take the oldest event out of the queue."""
        part, event = self._queue.popleft()
        passed = self._since.elapsed_time(event) / 1e3
        self._seconds[part] = self._seconds.get(part, 0.0) + passed
        self._free.append(self._since)
        self._since = event
