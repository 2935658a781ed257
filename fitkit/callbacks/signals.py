"""The signals by which a scheduler says that a job's time is over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

from fitkit.errors import warn

CHILD_GRACE_S = 10
"""How long a forked child lives on after SIGTERM."""


class Preempted(SystemExit):
    """The training was cut by a signal; all of it is in a file.

    Attributes:
        code: the status that a shell gives to a process ended by this signal: 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class SignalNotes:
    """Takes note of SIGTERM, and of SIGUSR1 in a SLURM batch job, until `restore`.

    Only the main thread can have handlers; elsewhere nothing is noted. A signal that is ignored
    stays ignored.

    Attributes:
        arrived: the first signal that came; None before.
    """

    def __init__(self) -> None:
        self.arrived: int | None = None
        self._came: tuple[int, FrameType | None] | None = None
        self._previous: dict[int, Any] = {}  # handlers that ours stand for now
        self._handlers: dict[int, Any] = {}  # those that are back
        self._childrens: Any = None  # torch's handler for the end of children
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        """What travels to other ranks: nothing; each has handlers of its own."""
        return vars(SignalNotes())

    def begin(self) -> None:
        """Put the handlers in."""
        self.restore()
        self.arrived, self._came = None, None
        self._owner = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in noted_signals():
            previous = signal.getsignal(number)
            # None: a handler that Python can't put back.
            if previous is not None and previous != signal.SIG_IGN:
                signal.signal(number, self._note)
                self._previous[number] = previous

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked child, which the step that is still made may need; but nobody may wait for
            # ever for a child that was told to end.
            if number == signal.SIGTERM:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(CHILD_GRACE_S)
            return
        if self.arrived is None:
            self.arrived, self._came = number, (number, frame)
            self._let_workers_go()

    def _let_workers_go(self) -> None:
        """Let the step be finished although a DataLoader's workers got the signal, too, and ended.

        torch raises in the midst of a step when one has; their next batch fails anyway.
        """
        if hasattr(signal, "SIGCHLD") and callable(signal.getsignal(signal.SIGCHLD)):
            self._childrens = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def restore(self, *, leaving: bool = False) -> None:
        """Put the handlers back that were there before.

        Args:
            leaving: whether the process ends now. torch's handler would raise in its last moments
                because a DataLoader's workers have ended before it.
        """
        previous, self._previous = self._previous, {}
        if not previous or self._owner != os.getpid():
            return
        for number, handler in previous.items():
            if signal.getsignal(number) == self._note:  # else somebody has set another since
                signal.signal(number, handler)
        self._handlers = previous
        if self._childrens is not None and not leaving:
            signal.signal(signal.SIGCHLD, self._childrens)
            self._childrens = None

    def pass_on(self) -> None:
        """After `restore`: call the handler that was there before, where that was a function."""
        came, self._came = self._came, None
        if came is None:
            return
        handler = self._handlers.get(came[0])
        if callable(handler):
            handler(*came)


def noted_signals() -> list[int]:
    """The signals that mean that a job is to end."""
    numbers = [signal.SIGTERM]
    if slurm_job() is not None and hasattr(signal, "SIGUSR1"):
        numbers.append(signal.SIGUSR1)
    return [int(number) for number in numbers]


def slurm_job() -> str | None:
    """This SLURM batch job's number as `scontrol` takes it; None in none, or in a shell of one."""
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    array, task = (os.environ.get(f"SLURM_ARRAY_{what}_ID") for what in ("JOB", "TASK"))
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID") or None


def requeue() -> None:
    """Put this SLURM job into the queue again, where there is a `scontrol`; else warn."""
    job, program = slurm_job(), shutil.which("scontrol")
    if job is None or program is None:
        warn("There is no scontrol here to requeue the job; submit it again to go on.")
        return
    done = subprocess.run([program, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        warn(f"scontrol requeue {job} failed ({done.stderr.strip()}); submit it again to go on.")
