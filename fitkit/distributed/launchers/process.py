"""A process that holds a rank: its threads, its signals, its start and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from fitkit.distributed.launchers.worker import FILES_AT_A_TIME, Report


def share_of_cores(ranks: int) -> int:
    """Threads for each of several ranks on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1


@contextlib.contextmanager
def threads_shared(ranks: int) -> Iterator[None]:
    """Give this process its share of the cores for the length of a call."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, share_of_cores(ranks)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


GRACE_S = 2.0
"""How long after Ctrl-C an exchange may go on before the other ranks are ended."""


@contextlib.contextmanager
def ended_by_interrupt(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` where Ctrl-C finds this process inside an exchange.

    Python runs no handler while C++ waits; ended ranks break the exchange off.

    Args:
        end: ends the other ranks; called in a thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while byte := reading.recv(1):
                if byte[0] == signal.SIGINT and not over.wait(GRACE_S):
                    end()

    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="fitkit-interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        # Closing isn't enough: processes that were forked meanwhile hold it open.
        writing.shutdown(socket.SHUT_RDWR)
        writing.close()
        thread.join(GRACE_S)
        reading.close()


START = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('FITKIT_PATH')); "
    "from fitkit.distributed.launchers.worker import main; main({}, {})"
)


class WorkerProcess:
    """Starts a worker; what its parent says to it, hears of it, and does with it.

    Args:
        rank: which it holds.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self._files, their_files = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        threads = str(share_of_cores(2))
        self.process = subprocess.Popen(
            [
                sys.executable,
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                "-c",
                START.format(theirs.fileno(), their_files.fileno()),
            ],
            pass_fds=(theirs.fileno(), their_files.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # rank 0 prints; the others would repeat it
            stderr=self._said,
            start_new_session=True,  # Ctrl-C goes to the whole group; rank 0 alone handles it
            env={"OMP_NUM_THREADS": threads, **os.environ, "FITKIT_PATH": json.dumps(sys.path)},
        )
        theirs.close()
        their_files.close()
        self.connection = Connection(ours.detach())

    def send(self, message: Any) -> None:
        self.connection.send(message)

    def send_files(self, files: list[int]) -> None:
        for start in range(0, len(files), FILES_AT_A_TIME):
            socket.send_fds(self._files, [b"f"], files[start : start + FILES_AT_A_TIME])

    def receive(self, seconds: float) -> Report | None:
        """The next report; None where none comes in time, or the worker has gone."""
        try:
            if self.connection.poll(max(seconds, 0.0)):
                report = self.connection.recv()
                return report if isinstance(report, Report) else None
        except (EOFError, OSError):
            pass
        return None

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        code = self.process.returncode
        if code is None:
            return "did not finish"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
        return f"left with status {code}, without a word"

    def last_words(self) -> str:
        """The end of what the worker wrote to its standard error."""
        with contextlib.suppress(OSError, ValueError):
            length = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(length - 4000, 0))
            return self._said.read().decode(errors="replace")
        return ""

    def end_children(self) -> None:
        """End the worker, where it still lives, and what it started: it has its own session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.end_children()
        self.process.wait()
        for thing in (self.connection, self._files, self._said):
            thing.close()
