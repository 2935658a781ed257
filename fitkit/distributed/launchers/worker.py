"""A worker process: holds one rank of each call until the process that started it goes.

The main thread runs calls. A second thread reads the connection all the time, so that the worker
leaves as soon as its parent is gone, even by `kill -9`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import random
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.launchers.existing import ExistingLauncher
from fitkit.distributed.launchers.payload import load
from fitkit.distributed.launchers.process import end_own_session, share_of_cores
from fitkit.distributed.launchers.watch import LAST_RESORT_S, Failure
from fitkit.distributed.meeting_folder import MeetingFolder
from fitkit.distributed.rendezvous import Meeting
from fitkit.distributed.world import World
from fitkit.errors import WorkerError

if TYPE_CHECKING:
    from fitkit.distributed.strategies.base import Strategy

FILES_AT_A_TIME = 200
"""Unix sockets pass at most 253 files in one message."""


@dataclasses.dataclass
class Call:
    """What the parent sends to run something on one rank.

    Attributes:
        number: of the call, by which its store is found.
        seed: of the rank's random numbers.
        folder: where it works.
        path: of its imports.
        data, file_count: the payload.
    """

    number: int
    seed: int
    folder: str
    path: list[str]
    data: bytes
    file_count: int


class WorkerLauncher(ExistingLauncher):
    """Makes a worker's part of a call.

    Args:
        strategy: as sent by rank 0.
        cluster: this process's place.
        store: of the call.
    """

    def __init__(self, strategy: Strategy, cluster: Cluster, store: Store) -> None:
        super().__init__(strategy, cluster)
        self._call_store = store

    def meet(self, verb: str) -> Store:
        place = self.cluster
        meeting = Meeting(place.rank, place.world_size, verb, self.timeout)
        return meeting.at(self._call_store, self.lost)


def main(connection_file: int, files_file: int, folder: str, rank: int, size: int) -> None:
    """Serve calls; never returns.

    Args:
        connection_file: from where calls come.
        files_file: from where shared memory comes.
        folder: where the ranks meet.
        rank, size: of this process.
    """
    connection, files = Connection(connection_file), socket.socket(fileno=files_file)
    calls: queue.Queue[Call] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    meeting = MeetingFolder(Path(folder))
    meeting.store(0).set(f"ready/{rank}", "")
    while True:
        call = calls.get()
        store = meeting.store(call.number)
        try:
            with contextlib.suppress(OSError):
                os.chdir(call.folder)
            sys.path[:] = call.path
            strategy, function, arguments = load(call.data, _receive(files, call.file_count))
        except BaseException as error:
            Failure.of(rank, error).write(store)
            end_own_session()
        random.seed(call.seed)
        np.random.seed(call.seed % 2**32)
        torch.manual_seed(call.seed)
        torch.set_num_threads(share_of_cores(size))
        strategy.world = World(rank, size, rank)
        cluster = Cluster("fitkit", rank, rank, size, size, 0, 1)
        try:
            WorkerLauncher(strategy, cluster, store).launch(function, *arguments)
        except WorkerError as error:
            # Not this rank's failure. Rank 0 ends this process once it knows whose that is: were it
            # to go by itself, that might be taken for the cause.
            time.sleep(LAST_RESORT_S)
            with contextlib.suppress(Exception):
                Failure.of(rank, error).write(store)
            end_own_session()
        except BaseException:
            end_own_session()  # it has been told; what it holds of torch may hang for ever


def _receive(files: socket.socket, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        _, new, _, _ = socket.recv_fds(files, 1, FILES_AT_A_TIME)
        if not new:
            end_own_session()
        found.extend(new)
    return found


def _listen(connection: Connection, calls: queue.Queue[Call]) -> None:
    """Read what the parent sends; leave when it has gone."""
    parent = os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(1.0):
                calls.put(connection.recv())
    end_own_session()
