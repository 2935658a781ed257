"""A worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from fitkit.distributed.launchers.cores import share_of_cores
from fitkit.distributed.launchers.worker import FILES_AT_A_TIME, Report

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
