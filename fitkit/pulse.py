"""Where this process's calls are: what a look from another thread finds of them.

A call notes its verb (`running`), a pass its stage (`heard`). Batches are counted by an iterator of
Python's own, which another thread can ask how far it is: a batch costs 0.1 µs and calls nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from operator import itemgetter, length_hint
from typing import Any

from fitkit.errors import ConfigurationError

SILENCE = "FITKIT_SILENCE"
"""The environment variable that says after how many seconds without a batch a line is printed."""
SILENCE_S = 60.0
"""Its default."""
ABOUT = 0.9
"""What has been still for that share of a time counts as still for all of it."""
STEPS = sys.maxsize
"""The length of the counters."""


class Pulse:
    """Where a call is.

    Attributes:
        verb: what was called, such as `"fit"`.
        thread: the id of the thread that called it.
        alone: whether no other rank takes part. Ranks watch each other.
        number: of the call in this process.
        stage: of the pass that runs now or ran last, such as `"validation"`.
        epoch: from 0; None outside of `fit`.
    """

    __slots__ = ("_first", "_left", "alone", "epoch", "number", "stage", "thread", "verb")

    def __init__(self, verb: str, *, alone: bool) -> None:
        self.verb: str = verb
        self.alone: bool = alone
        self.thread: int = threading.get_ident()
        self.number: int = next(_numbers)
        self.stage: str = ""
        self.epoch: int | None = None
        self._first, self._left = 0, iter(range(STEPS))

    @property
    def batches(self) -> int:
        """How many batches of the pass have been taken."""
        return self._first + STEPS - length_hint(self._left)

    @property
    def mark(self) -> tuple[Any, ...]:
        """What changes with each batch."""
        return self.number, self.epoch, self.stage, self.batches

    def count(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Return the batches of a pass, which are counted from `first` on."""
        self._first, self._left = first, iter(range(STEPS))
        return map(itemgetter(0), zip(batches, self._left, strict=False))


_numbers = itertools.count()
_running: list[Pulse] = []
"""The running calls, in the order in which they began."""


def pulses(thread: int) -> list[Pulse]:
    """Return a thread's running calls, the outermost first."""
    return [pulse for pulse in list(_running) if pulse.thread == thread]


def lone_threads() -> set[int]:
    """Return the ids of the threads in which calls run, without those of several ranks."""
    calls = list(_running)
    return {call.thread for call in calls} - {call.thread for call in calls if not call.alone}


@contextlib.contextmanager
def running(verb: str, *, alone: bool) -> Iterator[Pulse]:
    """Note a call for the length of a block.

    Args:
        verb: what is called.
        alone: whether no other rank takes part.
    """
    pulse = Pulse(verb, alone=alone)
    _running.append(pulse)
    try:
        yield pulse
    finally:
        _running.remove(pulse)


def heard(
    batches: Iterator[Any], stage: str, epoch: int | None = None, first: int = 0
) -> Iterator[Any]:
    """Return the batches of a pass of this thread's innermost call, and let the call count them.

    Args:
        batches: as they are read.
        stage: `"training"`, `"validation"`, `"test"` or `"predict"`.
        epoch: from 0. None leaves the call's.
        first: the number of the first batch.
    """
    found = pulses(threading.get_ident())
    if not found:
        return batches
    pulse = found[-1]
    pulse.stage, pulse.epoch = stage, pulse.epoch if epoch is None else epoch
    return pulse.count(batches, first)


def silence_s() -> float:
    """Return after how many seconds without a batch the ranks' places are shown; 0 for never.

    Raises:
        ConfigurationError: the environment variable isn't such a number.
    """
    text = os.environ.get(SILENCE, "").strip()
    if not text:
        return SILENCE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"The environment variable {SILENCE}={text!r} must be a number of seconds, such as 60, "
            "or 0 to switch off what is said after so long without a batch."
        )
    return seconds


class Stillness:
    """How long a thread's calls haven't moved, and what it has computed since.

    Args:
        thread: the thread's id.

    Attributes:
        since: when they moved last, on the monotonic clock, as far as looks have shown.
    """

    def __init__(self, thread: int) -> None:
        self.thread: int = thread
        self._mark: Any = None
        self.look()

    def look(self) -> float:
        """Look whether they have moved; return for how many seconds they haven't."""
        now = time.monotonic()
        mark = [pulse.mark for pulse in pulses(self.thread)]
        if mark != self._mark:
            self._mark, self.since, self._computed = mark, now, _computed_s(self.thread)
        return now - self.since

    def share(self) -> float | None:
        """Return the share of a core that the thread has used since; None where unknown."""
        computed, seconds = _computed_s(self.thread), time.monotonic() - self.since
        if computed is None or self._computed is None or seconds <= 0:
            return None
        return (computed - self._computed) / seconds


def _computed_s(thread: int) -> float | None:
    """Return the CPU seconds of a thread that lives; None where the system doesn't say."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    with contextlib.suppress(OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return None
