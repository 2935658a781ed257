"""A process that holds a rank: its threads, its signals, its output, its start and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch

from fitkit.errors import with_code
from fitkit.extras.launchers.meeting_folder import MeetingFolder
from fitkit.extras.launchers.other_ranks import OtherRanks
from fitkit.extras.launchers.watch import Failure
from fitkit.seams.machines import usable_cores

LONGEST_LINE = 65_536
"""Bytes; a longer line is shown in parts, so that memory is bounded."""
MISMATCH = "op.preamble.length"
"""What gloo says when it ends a process to which another sends more bytes than it waits for."""
LAST_WORDS = 4_000
"""Bytes of the standard error that are kept for the message about a rank that ended."""
LAST_LINES_S = 1.0
"""How long rank 0 waits, at a call's end, until what the others wrote is shown."""

_one_at_a_time = threading.Lock()


class ShownOutput:
    """Shows what a rank's process writes, until it has closed both of its streams.

    By default the other ranks print nothing: they run the same program, and would repeat rank 0.
    A thread of rank 0 always reads their pipes, so no rank waits for a reader. Only the part of a
    line that isn't complete yet is kept.

    Args:
        rank: the process's.
        out, err: the pipes' ends from which its standard output and error are read.
    """

    def __init__(self, rank: int, out: IO[bytes], err: IO[bytes]) -> None:
        self._prefix = f"[rank {rank}] "
        self._open = {out.fileno(): "stdout", err.fileno(): "stderr"}
        self._pipes = (out, err)  # closed with this object
        self._parts = {"stdout": b"", "stderr": b""}  # of a line, without its end
        self._words = b""
        self._showing = threading.Lock()
        for name in self._parts:
            _write(name, [])
        self._thread = threading.Thread(target=self._run, name=f"fitkit-rank-{rank}", daemon=True)
        self._thread.start()

    def words(self) -> str:
        """Return the end of what the process wrote to its standard error."""
        return self._words.decode(errors="replace")

    def wait(self) -> None:
        """Wait until what was written so far is shown."""
        deadline = time.monotonic() + LAST_LINES_S
        while self._ready(0) and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._showing.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            self._showing.release()

    def wait_for_end(self) -> None:
        """Wait until all is shown, of a process that has ended."""
        self._thread.join(LAST_LINES_S)  # what the process started may hold the pipes open

    def _ready(self, timeout_ms: int | None) -> list[int]:
        found = select.poll()
        for file in list(self._open):
            found.register(file, select.POLLIN)
        return [file for file, _ in found.poll(timeout_ms)]

    def _run(self) -> None:
        while self._open:
            for file in self._ready(None):
                with self._showing:
                    self._read(file)

    def _read(self, file: int) -> None:
        name = self._open[file]
        new = os.read(file, LONGEST_LINE)
        if not new:
            del self._open[file]
            new = b"\n" if self._parts[name] else b""
        elif name == "stderr":
            self._words = (self._words + new)[-LAST_WORDS:]
        *lines, rest = (self._parts[name] + new).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        # Of a bar that draws itself again and again only the last drawing is kept.
        self._parts[name] = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if lines:
            _write(name, [self._prefix + _as_on_a_terminal(line) for line in lines])


def _write(name: str, lines: list[str]) -> None:
    """Write lines to a stream of this process, between lines of its own."""
    # Where rank 0 has no stream, or a closed one, the rank goes on all the same.
    with _one_at_a_time, contextlib.suppress(Exception):
        stream = getattr(sys, name)
        if not getattr(stream, "line_buffering", True) or getattr(stream, "write_through", False):
            # Else a `print` of the main thread may write a part of its line, and meanwhile lets
            # this thread run.
            stream.reconfigure(line_buffering=True, write_through=False)
        for line in lines:  # one by one: the system doesn't cut what is short
            stream.write(line + "\n")
        stream.flush()


def _as_on_a_terminal(line: bytes) -> str:
    """Return a line as one would see it: what stands after its last return to the margin."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


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


def open_standard_files() -> None:
    """Open those of this process's first three files that are closed, as a daemon's are.

    A connection that got such a number wouldn't reach a process that is started: there it is the
    number of a standard stream.
    """
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number


class RankProcess:
    """The process of one of the other ranks: its start, its last words and its end.

    Args:
        rank: which it holds.
        size: how many ranks share the machine's cores.
        command: the program and its arguments.
        variables: of its environment, beside this process's.
        folder: where it starts; None for where this process is.
        files: open files that it gets, by the same numbers.
        shows_output: whether this process shows what it prints.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        command: list[str],
        variables: Mapping[str, str],
        folder: str | None = None,
        files: tuple[int, ...] = (),
        shows_output: bool = False,
    ) -> None:
        self.rank = rank
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  `end` closes it
        self._last_words = ""
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(share_of_cores(size))}
        if shows_output:
            # Python would keep what it prints until some thousand bytes have come together.
            own["PYTHONUNBUFFERED"] = "1"
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **own, **variables},
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
        self._last_words = self.words()
        self._said.close()

    def has_failed(self) -> bool:
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
        what, words = f"Rank {self.rank} left with status {code}.", self.words()
        if code < 0:
            name = signal.Signals(-code).name
            what = f"Rank {self.rank} was ended by {name}."
            if name == "SIGKILL":
                what = with_code(f"Rank {self.rank} was ended by {name} (out of memory?).", "FK041")
            elif MISMATCH in words:
                what = with_code(
                    f"Rank {self.rank} was ended by {name}: gloo ends a process to which another "
                    "sends more than it waits for, so the ranks met in different exchanges. One of "
                    "them makes a call that the others don't, for example a backward pass.",
                    "FK043",
                )
        return Failure(self.rank, what, words)

    def words(self) -> str:
        """Return the end of what it wrote to its standard error."""
        if self._shown is not None:
            return self._shown.words()
        if self._said.closed:
            return self._last_words
        with contextlib.suppress(OSError):
            length = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(length - LAST_WORDS, 0))
            return self._said.read().decode(errors="replace")
        return ""


class StartedRanks(OtherRanks):
    """The other ranks that this process has started.

    Args:
        shows_output: whether this process shows what they print.

    Attributes:
        owner: this process's number; a fork of it has another.
        folder: where the ranks meet.
        processes: of the other ranks, in order.
    """

    prints = False

    def __init__(self, shows_output: bool) -> None:
        self.owner: int = os.getpid()
        self.shows_output = shows_output
        self.folder: MeetingFolder = MeetingFolder.make()
        self.processes: list[Any] = []

    def lost(self) -> Failure | None:
        return next(filter(None, (process.failure() for process in self.processes)), None)

    @contextlib.contextmanager
    def during_call(self) -> Iterator[None]:
        with threads_shared(len(self.processes) + 1), ended_by_interrupt(self.end_processes):
            try:
                yield
            finally:
                for process in self.processes:
                    process.wait_for_output()

    def end_processes(self) -> None:
        """End the other ranks now."""
        for process in self.processes:
            process.end()
