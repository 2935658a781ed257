"""The launcher of `ddp_spawn`: the caller's process is rank 0, and workers run the other ranks.

Workers stay alive between calls and exit with this process. They don't import the script, so it
needs no `__main__` guard. A call on more ranks starts the missing workers, and a call on fewer
ranks ends the surplus ones. `payload.py` sends what a call needs.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from fitkit.accelerators import empty_cache
from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.launchers import group
from fitkit.extras.launchers.group import place_among
from fitkit.extras.launchers.meeting_folder import MeetingFolder
from fitkit.extras.launchers.other_ranks import end_own_session, end_with_parent
from fitkit.extras.launchers.payload import Payload, load
from fitkit.extras.launchers.process import (
    RankProcess,
    StartedRanks,
    open_standard_files,
    share_of_cores,
)
from fitkit.extras.launchers.ranks import JoinsRanks, RankLauncher
from fitkit.extras.launchers.script_objects import script, take_part
from fitkit.extras.launchers.stores import Patience
from fitkit.extras.launchers.watch import LAST_RESORT_S, Failure
from fitkit.seams.launchers import in_own_group
from fitkit.seams.strategies import World

Result = TypeVar("Result")

START_TIMEOUT_S = 120.0
"""How long a worker may take to start; importing torch is slow on a busy machine."""
LOAD_TIMEOUT = timedelta(seconds=300)
"""How long a worker may take to unpack a call; unpacking can import any module."""
FILES_AT_A_TIME = 200
"""How many files one message carries; Unix sockets pass at most 253."""


class WorkersLauncher(RankLauncher):
    """Runs a call in this process as rank 0, and in worker processes as the other ranks.

    Args:
        strategy: enters and leaves the ranks' process group.
        size: the number of ranks.
        shows_output: whether rank 0 shows what the other ranks print.
    """

    ends_process = False  # it may belong to a notebook
    sends_calls: bool = True

    def __init__(self, strategy: JoinsRanks, size: int, shows_output: bool = False) -> None:
        super().__init__(strategy, timeout=LOAD_TIMEOUT)
        self.size = size
        self.shows_output = shows_output
        # A callback has copied or compiled the model, so every rank has it, and makes its calls.
        self._made_inside = place_among(size) is not None

    def launch(self, verb: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function(*arguments)` on every rank.

        Returns:
            The result of rank 0's call.

        Raises:
            WorkerError: another rank failed; the message has its traceback. The workers are ended,
                and the next call starts new ones.
        """
        with _calls:
            if in_own_group():
                if self._made_inside and place_among(self.size) is not None:
                    return self._inside(function, arguments)
                raise ConfigurationError(
                    "A call on several devices was made within another model's call, in its "
                    "worker processes. Compile this model with devices=1, or call it after the "
                    "other call."
                )
            payload = self._payload(verb, function, arguments)
            try:
                with contextlib.closing(payload):
                    self.others: Pool = _pool_of(self.size, self.shows_output)
                    self.call_store: Store = self.others.begin(payload)
                return super().launch(verb, function, *arguments)
            except BaseException as error:
                end_workers()
                self._leave()  # takes `LEAVE_S` at most
                if isinstance(error, WorkerError) and error.rank != 0:
                    _say_what_was_not_sent(error)
                raise

    def on_rank_zero(self, what: str, work: Callable[[], None]) -> None:
        """Do the work in this process; workers are idle between calls."""
        work()

    def _release(self) -> None:
        """Only cut the connections. `launch` leaves the group once it has ended the workers."""
        group.hang_up()

    def _payload(
        self, verb: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Payload:
        sent = [
            getattr(argument, "for_other_ranks", lambda a=argument: a)() for argument in arguments
        ]
        modules = [value for value in arguments if isinstance(value, torch.nn.Module)]
        shape_only = [
            tensor for module in modules for tensor in (*module.parameters(), *module.buffers())
        ]
        names = ["model" if isinstance(a, torch.nn.Module) else type(a).__name__ for a in sent]
        parts = dict(zip(names, sent, strict=True))
        return Payload((self.strategy, verb, function, sent), shape_only, parts, self.strategy)


def _say_what_was_not_sent(error: WorkerError) -> None:
    """Add to a worker's error of a missing name that modules have only what their import gives."""
    words = error.remote_traceback.strip().splitlines()
    if words and words[-1].startswith(("AttributeError", "KeyError", "NameError")):
        error.args = (
            f"{error}\n\nA worker process imports your modules anew. What your program has put "
            "into a module since its import, such as a registry that a net's constructor fills, "
            "isn't there. If that is missing, write strategy='ddp': each rank runs the program.",
        )


START = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('FITKIT_PATH')); "
    "from fitkit.extras.launchers.workers import main; main({}, {!r}, {})"
)


class WorkerProcess(RankProcess):
    """Starts a worker process and holds the connection to it.

    Args:
        rank: the worker's rank.
        size: the number of ranks in its first call; each call sends its number.
        folder: where the ranks meet.
        shows_output: whether this process shows what the worker prints.
    """

    def __init__(
        self, rank: int, size: int, folder: MeetingFolder, shows_output: bool = False
    ) -> None:
        open_standard_files()
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        super().__init__(
            rank,
            size,
            [sys.executable, *flags, "-c", START.format(theirs.fileno(), str(folder.path), rank)],
            {"FITKIT_PATH": json.dumps(sys.path)},
            files=(theirs.fileno(),),
            shows_output=shows_output,
        )
        theirs.close()

    def send(self, call: CallMessage, files: list[int]) -> None:
        """Send the worker a call, and after it the payload's files."""
        self._connection.send(call)
        for start in range(0, len(files), FILES_AT_A_TIME):
            socket.send_fds(self._socket, [b"f"], files[start : start + FILES_AT_A_TIME])

    def end(self) -> None:
        super().end()
        self._connection.close()
        self._socket.close()


class Pool(StartedRanks):
    """The worker processes, one for each rank except 0."""

    processes: list[WorkerProcess]

    @property
    def usable(self) -> bool:
        """Return whether all workers are alive and this process started them."""
        return (
            bool(self.processes)
            and self.owner == os.getpid()
            and all(worker.lives() for worker in self.processes)
        )

    def resize(self, size: int) -> None:
        """Start or end workers until there is one for each rank except 0.

        Args:
            size: the number of ranks in the next call.

        Raises:
            WorkerError: a worker didn't start.
        """
        # End surplus workers, to free their memory and their devices.
        for worker in self.processes[size - 1 :]:
            worker.end()
        del self.processes[size - 1 :]
        store, kept = self.folder.store(0), len(self.processes)
        for rank in range(kept + 1, size):
            store.delete_key(f"ready/{rank}")  # left by a surplus worker
            self.processes.append(WorkerProcess(rank, size, self.folder, self.shows_output))
        patience = Patience(START_TIMEOUT_S, 0.01)
        for worker in self.processes[kept:]:
            while not store.check([f"ready/{worker.rank}"]):
                if worker.lives() and patience.remains():
                    continue
                said = worker.words()
                self.end()
                raise WorkerError(
                    f"The worker process for rank {worker.rank} did not start within "
                    f"{START_TIMEOUT_S:.0f} s.\n{said}",
                    worker.rank,
                    said,
                )

    def begin(self, payload: Payload) -> Store:
        """Send every worker a call; return the store where its ranks meet."""
        store = self.folder.next_store()
        # Derive the seed from rank 0's state without a draw. Rank 0 then draws the same numbers as
        # a single process.
        seed = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        for worker in self.processes:
            call = CallMessage(
                self.folder.calls, len(self.processes) + 1, seed + worker.rank, os.getcwd(),
                list(sys.path), script(), payload.data, len(payload.files),
            )  # fmt: skip
            with contextlib.suppress(OSError):  # the worker has ended; `lost` reports how
                worker.send(call, payload.files)
        return store

    def end(self) -> None:
        """End the workers and remove their meeting folder."""
        self.end_processes()
        self.processes = []
        self.folder.remove()


_pool: Pool | None = None
_calls = threading.RLock()
"""The thread whose call uses the workers holds this lock; calls of other models wait for it."""


def _pool_of(size: int, shows_output: bool = False) -> Pool:
    """Return the pool, with a living worker for each of `size` ranks except 0."""
    global _pool
    if _pool is None or _pool.shows_output != shows_output or not _pool.usable:
        end_workers()
        _pool = Pool(shows_output)
    _pool.resize(size)
    return _pool


def end_workers() -> None:
    """End all worker processes of this process; the next call starts new ones."""
    global _pool
    if _pool is not None and _pool.owner == os.getpid():
        _pool.end()
    _pool = None


atexit.register(end_workers)


# ---------------------------------------------------------------------- in a worker


@dataclasses.dataclass
class CallMessage:
    """Holds what the parent sends to run a call on one rank.

    Attributes:
        number: the call's number, which identifies its store.
        size: the number of ranks.
        seed: the seed of the rank's random numbers.
        folder: the working directory.
        path: the import path, `sys.path`.
        script: the script, for processes that this one starts.
        data: the payload's bytes.
        file_count: how many files the payload has.
    """

    number: int
    size: int
    seed: int
    folder: str
    path: list[str]
    script: dict[str, Any]
    data: bytes
    file_count: int


def main(connection_file: int, folder: str, rank: int) -> None:
    """Serve calls; this never returns.

    Args:
        connection_file: the file descriptor that calls and shared memory come from.
        folder: where the ranks meet.
        rank: the rank of this process.
    """
    end_with_parent()
    files = socket.socket(fileno=os.dup(connection_file))
    connection = Connection(connection_file)
    meeting = MeetingFolder(Path(folder))
    meeting.store(0).set(f"ready/{rank}", "")
    while True:
        try:
            call = connection.recv()
        except (EOFError, OSError):  # the parent has gone
            end_own_session()
        _run_call(call, files, meeting, rank)


def _run_call(call: CallMessage, files: socket.socket, folder: MeetingFolder, rank: int) -> None:
    """Run one call and keep nothing of it; if it fails, end this process."""
    store = folder.store(call.number)
    try:
        with contextlib.suppress(OSError):
            os.chdir(call.folder)
        sys.path[:] = call.path
        sent, named = load(call.data, _receive(files, call.file_count))
        strategy, verb, function, arguments = sent
        take_part(call.script, named)
    except BaseException as error:
        Failure.of(rank, error).write(store)
        end_own_session()
    random.seed(call.seed)
    np.random.seed(call.seed % 2**32)
    torch.manual_seed(call.seed)
    torch.set_num_threads(share_of_cores(call.size))
    strategy.world = World(rank, call.size, rank)
    try:
        launcher = RankLauncher(strategy, timeout=LOAD_TIMEOUT, store=store)
        launcher.launch(verb, function, *arguments)
        empty_cache(strategy.device)  # for rank 0's process, which may compute alone now
    except WorkerError as error:
        # Another rank failed. Rank 0 ends this process once it knows which one. If this process
        # exited by itself, rank 0 might take its exit for the cause.
        time.sleep(LAST_RESORT_S)
        with contextlib.suppress(Exception):
            Failure.of(rank, error).write(store)
        end_own_session()
    except BaseException:
        end_own_session()  # already reported; a normal exit may hang forever in torch


def _receive(files: socket.socket, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        _, new, _, _ = socket.recv_fds(files, 1, FILES_AT_A_TIME)
        if not new:
            end_own_session()
        found.extend(new)
    return found
