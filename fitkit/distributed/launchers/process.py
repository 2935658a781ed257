"""A process that holds a rank: its threads, its signals, its start and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn

import torch

from fitkit.distributed.devices import usable_cores
from fitkit.distributed.launchers.output import ShownOutput
from fitkit.distributed.launchers.watch import Failure
from fitkit.errors import with_code


def share_of_cores(ranks: int) -> int:
    """Threads for each of several ranks on this machine."""
    return max(1, (usable_cores() or 1) // ranks)


@contextlib.contextmanager
def threads_shared(ranks: int) -> Iterator[None]:
    """Give this process its share of the cores for the length of a call."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, share_of_cores(ranks)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


INTERRUPT_WAIT_S = 2.0
"""How long after Ctrl-C an exchange may continue before the other ranks are ended."""


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
                if byte[0] == signal.SIGINT and not over.wait(INTERRUPT_WAIT_S):
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
        thread.join(INTERRUPT_WAIT_S)
        reading.close()


class RankProcess:
    """The process of one of the other ranks: its start, its last words and its end.

    Args:
        rank: which it holds.
        command: the program and its arguments.
        variables: of its environment, beside this process's.
        folder: where it starts; None for where this process is.
        files: open files that it gets, by the same numbers.
        shows_output: whether this process shows what it prints.
    """

    def __init__(
        self,
        rank: int,
        command: list[str],
        variables: Mapping[str, str],
        folder: str | None = None,
        files: tuple[int, ...] = (),
        shows_output: bool = False,
    ) -> None:
        self.rank = rank
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the rank
        # Python would keep what it prints to a pipe until some thousand bytes have come together.
        unbuffered = {"PYTHONUNBUFFERED": "1"} if shows_output else {}
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **unbuffered, **variables},
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            # Rank 0 prints; the others would repeat it.
            stdout=subprocess.PIPE if shows_output else subprocess.DEVNULL,
            stderr=subprocess.PIPE if shows_output else self._said,
            start_new_session=True,  # Ctrl-C goes to the whole group; rank 0 alone handles it
        )
        self._shown: ShownOutput | None = None
        if self._process.stdout is not None and self._process.stderr is not None:
            self._shown = ShownOutput(rank, self._process.stdout, self._process.stderr)

    def wait_for_output(self) -> None:
        """Wait until what it printed so far is shown, where it is."""
        if self._shown is not None:
            self._shown.wait()

    def lives(self) -> bool:
        """Whether it hasn't ended."""
        return self._process.poll() is None

    def ends_before(self, deadline: float) -> bool:
        """Wait for its end, until a time of the monotonic clock."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """End it, where it still lives, and what it started: it has its own session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:  # Windows has no sessions
                self._process.kill()
        self._process.wait()
        if self._shown is not None:
            self._shown.wait_for_end()

    def broke(self) -> bool:
        """Whether it ended by a signal or an exception; other statuses are the script's own."""
        code = self._process.returncode
        return code is not None and (code < 0 or (code > 0 and "Traceback (most" in self.words()))

    def failure(self) -> Failure | None:
        """How it ended, with the end of what it wrote to its standard error; None while it lives.

        What it has left behind is ended: its DataLoader workers hold copies of its connections,
        so that the other ranks wouldn't notice that it has gone.
        """
        code = self._process.poll()
        if code is None:
            return None
        self.end()
        what = f"Rank {self.rank} left with status {code}."
        if code < 0:
            name = signal.Signals(-code).name
            what = f"Rank {self.rank} was ended by {name}."
            if name == "SIGKILL":
                what = with_code(f"Rank {self.rank} was ended by {name} (out of memory?).", "FK041")
        return Failure(self.rank, what, self.words())

    def words(self) -> str:
        """The end of what it wrote to its standard error."""
        if self._shown is not None:
            return self._shown.words()
        with contextlib.suppress(OSError, ValueError):
            length = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(length - 4000, 0))
            return self._said.read().decode(errors="replace")
        return ""


def first_lost(processes: Iterable[RankProcess]) -> Failure | None:
    """The failure of the first rank, in their order, whose process has ended."""
    return next(filter(None, (process.failure() for process in processes)), None)


def end_own_session() -> NoReturn:
    """End this process and what it started at once: threads of torch may hang for ever.

    DataLoader workers hold copies of this rank's connections: while one of them lives, the other
    ranks don't notice that this one has gone.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
