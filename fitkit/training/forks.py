"""Processes that are forked while other threads run, such as the workers of a DataLoader.

A fork copies the locks of a process, but only the thread that forks. A lock that another thread
holds at that moment is never released in the new process, which may wait for it before it begins.
Python 3.11.9, 3.10.14 and earlier wait there for the lock of their thread states, which the threads
of a process group take for moments (python/cpython#112275). Later ones make that lock anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import connection, context, popen_fork
from typing import Any

import torch

from fitkit.errors import ConfigurationError, FitkitError, warn
from fitkit.training.torch_flags import ProcessFlag

TRIES = 4
"""How many processes are forked until one begins."""

PATIENCE = "FITKIT_FORK_PATIENCE"
"""The environment variable that says how many seconds a process may sleep before it begins."""

LIMIT_S = 300
"""How long one that doesn't sleep is waited for at most."""

STACKS = "fitkit-stack"
"""The name of the memory to which a process writes its stack when it gets SIGUSR1."""

LOOK_S = 0.25
"""Between two looks at a process that hasn't begun."""

_ADVICE = (
    "Such a process waits for a lock that another thread held at the fork. "
    + ("Use Python 3.11.10 or later, or w" if sys.version_info < (3, 11, 10) else "W")
    + 'rite DataLoader(multiprocessing_context="forkserver"), whose workers have no such locks.'
)


class Begun(popen_fork.Popen):
    """A forked process that has begun to run Python code. One that never begins is replaced.

    Raises:
        FitkitError: none began.
    """

    def _launch(self, process_obj: Any) -> None:
        for attempt in range(TRIES):
            with _pipe() as (told, tell):
                super()._launch(_Tells(process_obj, told, tell))  # type: ignore[misc]
                has_begun = False
                try:
                    has_begun = self._begins(told)
                finally:
                    if not has_begun:
                        self._undo()
            if has_begun:
                return
            if attempt == 0:
                warn(
                    f"{process_obj.name} was forked and never began. Another one takes its place. "
                    f"{_ADVICE}"
                )
        raise FitkitError(
            f"{process_obj.name} was forked and never began, nor did {TRIES - 1} others in its "
            f"place. {_ADVICE}",
            code="FK064",
        )

    def _begins(self, told: int) -> bool:
        """Wait until the process has begun, or ended. False if it never will.

        A slow process computes, or waits for a core or a disk. One that sleeps before it has begun
        waits for a lock.
        """
        patience, asleep_s, computed = _patience_s(), 0.0, math.nan
        # Looks are counted, not seconds: this process itself may have been stopped for a while.
        for _ in range(round(max(LIMIT_S, patience) / LOOK_S)):
            if connection.wait([told], LOOK_S) or self.poll() is not None:
                return True  # whoever started it sees if it has ended
            before, computed = computed, _computed_asleep(self.pid)
            asleep_s = asleep_s + LOOK_S if computed == before else 0.0
            if asleep_s >= patience:
                break
        return False

    def _undo(self) -> None:
        self.kill()
        self.wait()
        self.close()
        self.returncode = None


class _Tells:
    """A process to be forked, which tells through a pipe that it has begun."""

    def __init__(self, process: Any, told: int, tell: int) -> None:
        self._process = process
        self._told, self._tell = told, tell

    def _bootstrap(self, *arguments: Any, **named: Any) -> Any:
        os.close(self._told)
        torch.get_rng_state()  # a worker draws first; a thread that drew may have held this lock
        os.write(self._tell, b"\0")
        os.close(self._tell)
        _tell_stack_if_asked()
        return self._process._bootstrap(*arguments, **named)


def _tell_stack_if_asked() -> None:
    """Let this process write down where it is when it gets SIGUSR1, whatever it waits for.

    The process that forked it reads that in `/proc`. Where SIGUSR1 has a meaning, it keeps it.
    """
    is_free = hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if is_free and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            faulthandler.register(signal.SIGUSR1, file=os.memfd_create(STACKS))


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _patience_s() -> float:
    text = os.environ.get(PATIENCE, "").strip()
    if not text:
        return 5.0 if os.path.exists("/proc/self/stat") else 60.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"The environment variable {PATIENCE}={text!r} must be a number of seconds above 0, "
            "such as 5."
        )
    return seconds


def _computed_asleep(pid: int) -> float:
    """Return the CPU time of a process that sleeps, in ticks; NaN if it doesn't sleep.

    0 where the system has no `/proc`.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may be anything
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12]) if fields[0] == "S" else math.nan


def _put(popen: Any) -> None:
    if hasattr(context, "ForkProcess"):  # not on Windows
        context.ForkProcess._Popen = staticmethod(popen)  # type: ignore[method-assign]


def _restorer() -> Callable[[], None]:
    found = getattr(getattr(context, "ForkProcess", None), "_Popen", None)
    return lambda: _put(found)


FORK = ProcessFlag(_put, _restorer)
"""What starts a process that `multiprocessing` forks: `Begun` during a verb's call."""
