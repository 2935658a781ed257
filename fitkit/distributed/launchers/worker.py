"""A worker process: holds one rank of each call until the process that started it goes.

The main thread runs calls. A second thread reads the connection all the time, so that the worker
leaves as soon as its parent is gone (even by `kill -9`), and can tell where it hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import random
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

FILES_AT_A_TIME = 200
"""Unix sockets pass at most 253 files in one message."""


@dataclasses.dataclass
class Call:
    """What the parent sends to run something on one rank."""

    number: int
    rank: int
    size: int
    folder: str
    seed: int
    threads: int
    data: bytes
    file_count: int
    working_folder: str
    path: list[str]


@dataclasses.dataclass
class Report:
    """What a worker answers.

    Attributes:
        kind: `"ready"`, `"loaded"`, `"done"`, `"failed"` or `"where"`.
        number: the call that it is about.
        error: what failed, in one line.
        text: the traceback, or the stack of a worker that was asked where it is.
        collateral: whether the failure only shows that another rank has gone.
    """

    kind: str
    number: int = 0
    error: str = ""
    text: str = ""
    collateral: bool = False


class Worker:
    """The worker's side of the connection.

    Args:
        connection: to and from the parent.
        files: the socket over which shared memory comes.
    """

    def __init__(self, connection: Connection, files: socket.socket) -> None:
        self._connection = connection
        self._files = files
        self._calls: queue.Queue[Call] = queue.Queue()
        self._sending = threading.Lock()
        self._parent = os.getppid()
        self._main = threading.main_thread().ident

    def run(self) -> None:
        """Serve calls; never returns."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._send(Report("ready"))
        while True:
            call = self._calls.get()
            try:
                self._run_call(call)
            except BaseException as error:
                self._send(_failure(call.number, error))
                # A rank that failed but stayed alive would leave the others waiting for it.
                self._leave()
            self._send(Report("done", call.number))

    def _run_call(self, call: Call) -> None:
        import numpy as np
        import torch

        from fitkit.distributed.launchers.payload import load
        from fitkit.distributed.meeting_folder import MeetingFolder
        from fitkit.distributed.world import World

        with contextlib.suppress(OSError):
            os.chdir(call.working_folder)
        sys.path[:] = call.path
        strategy, function, arguments = load(call.data, self._receive_files(call.file_count))
        # Rank 0 enters the process group only now: nothing could call it out of there.
        self._send(Report("loaded", call.number))
        random.seed(call.seed)
        np.random.seed(call.seed % 2**32)
        torch.manual_seed(call.seed)
        torch.set_num_threads(call.threads)
        strategy.world = World(call.rank, call.size, call.rank)
        # After a failure the group isn't ended in good order: leaving the process does it.
        strategy.join(MeetingFolder(Path(call.folder)).store(call.number))
        function(*arguments)
        strategy.leave()

    def _receive_files(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            _, files, _, _ = socket.recv_fds(self._files, 1, FILES_AT_A_TIME)
            if not files:
                self._leave()
            found.extend(files)
        return found

    def _listen(self) -> None:
        """Read what the parent sends; leave when it has gone."""
        try:
            while True:
                while not self._connection.poll(1.0):
                    if os.getppid() != self._parent:
                        self._leave()
                message = self._connection.recv()
                if message == "where":
                    frame = sys._current_frames().get(self._main or 0)
                    stack = "".join(traceback.format_stack(frame)) if frame else ""
                    self._send(Report("where", text=stack))
                elif message == "stop":
                    self._leave()
                else:
                    self._calls.put(message)
        except (EOFError, OSError):
            self._leave()

    def _send(self, report: Report) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(report)

    def _leave(self) -> None:
        """End this process at once: threads of torch may hang in a collective for ever."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getsid(0) == os.getpid():
            # DataLoader workers hold copies of this rank's connections: while one of them lives,
            # the other ranks don't notice that this one has gone.
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


COLLATERAL = (
    "connection closed by peer", "connection reset", "connection refused", "broken pipe",
    "timed out waiting", "socket timeout", "gloo", "nccl", "wait timeout", "tcpstore",
    "failed to connect", "connection was likely closed",
)  # fmt: skip


def is_collateral(error: BaseException) -> bool:
    """Whether an error only shows that an exchange with another rank broke off."""
    import torch.distributed as dist

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        text = str(seen).lower()
        if isinstance(seen, (RuntimeError, OSError)) and any(part in text for part in COLLATERAL):
            return True
        seen = seen.__cause__
    return False


def _failure(number: int, error: BaseException) -> Report:
    return Report(
        "failed",
        number,
        error="".join(traceback.format_exception_only(error)).strip(),
        text="".join(traceback.format_exception(error)),
        collateral=is_collateral(error),
    )


def main(connection_file: int, files_file: int) -> None:
    """What a worker process runs."""
    worker = Worker(Connection(connection_file), socket.socket(fileno=files_file))
    worker.run()
