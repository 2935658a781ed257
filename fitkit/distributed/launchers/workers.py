"""The launcher of `ddp_spawn`: the caller's process is rank 0, workers hold the other ranks.

Workers live on between calls, leave with this process, and need no `__main__` guard: they don't
import the script. What a call needs is sent by `payload.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from fitkit.distributed import world
from fitkit.distributed.launchers.payload import Payload
from fitkit.distributed.launchers.process import (
    WorkerProcess,
    ended_by_interrupt,
    share_of_cores,
    threads_shared,
)
from fitkit.distributed.launchers.watch import broken_exchange, first_line
from fitkit.distributed.launchers.worker import Call, Report, is_collateral
from fitkit.distributed.meeting_folder import MeetingFolder
from fitkit.errors import ConfigurationError, WorkerError

if TYPE_CHECKING:
    from fitkit.distributed.strategies.base import Strategy

Result = TypeVar("Result")

START_TIMEOUT_S = 120.0
"""A worker imports torch first, which takes long on a busy machine."""
REPORT_TIMEOUT_S = 5.0
"""How long rank 0 waits for the word of a rank that broke off an exchange."""
REPORTS_S = {"loaded": 300.0, "done": 60.0}
"""How long a worker may take to unpack a call, which may import anything, and to end it."""
WATCH_S = 0.5
"""How often rank 0 looks whether a worker has ended."""
GRACE_S = 3.0
"""How long after that an exchange may go on before it is broken off."""
ANSWER_S = 1.5
"""How long a worker may take to say where it is."""


class WorkersLauncher:
    """Runs a call on rank 0 here and on the other ranks in worker processes.

    Args:
        strategy: enters and leaves the ranks' process group.
        size: how many ranks there are.
    """

    def __init__(self, strategy: Strategy, size: int) -> None:
        self.strategy = strategy
        self.size = size

    def launch(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function(*arguments)` on every rank.

        Returns:
            What rank 0's call gave.

        Raises:
            WorkerError: another rank failed; its traceback is in the message. The workers are
                ended then, and the next call starts new ones.
        """
        with _calls:
            return self._launched(function, arguments)

    def on_rank_zero(self, what: str, work: Callable[[], None]) -> None:
        """Do it here: the workers do nothing between calls."""
        work()

    def _launched(self, function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        with contextlib.closing(self._payload(function, arguments)) as payload:
            pool = _pool_of(self.size - 1)
            pool.begin(payload, self.size)
        try:
            with ended_by_interrupt(pool.end), threads_shared(self.size), pool.watched():
                pool.wait_for("loaded")
                self.strategy.join(pool.room)
                result = function(*arguments)
                self.strategy.leave()
            pool.wait_for("done")
            pool.close_room()
        except BaseException as error:
            failure = pool.failure_behind(error)
            pool.end()
            self.strategy.leave()
            if failure is None or failure is error:
                raise
            # What rank 0 was doing explains nothing, and holds DataLoader workers and ports.
            traceback.clear_frames(error.__traceback__)
            try:
                raise failure from error
            finally:
                del failure  # Else this frame and the error keep each other.
        return result

    def _payload(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Payload:
        sent = [
            getattr(argument, "for_other_ranks", lambda a=argument: a)() for argument in arguments
        ]
        modules = [value for value in arguments if isinstance(value, torch.nn.Module)]
        hollow = [
            tensor for module in modules for tensor in (*module.parameters(), *module.buffers())
        ]
        names = ["model" if isinstance(a, torch.nn.Module) else type(a).__name__ for a in sent]
        parts = dict(zip(names, sent, strict=True))
        return Payload((self.strategy, function, sent), hollow, parts)


class Pool:
    """Worker processes, one for each rank but 0.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.number = 0
        self.owner = os.getpid()
        self._began = 0.0
        self._folder = MeetingFolder.make()
        self._workers = [WorkerProcess(rank) for rank in range(1, count + 1)]
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in self._workers:
            report = worker.receive(deadline - time.monotonic())
            if report is None or report.kind != "ready":
                said = worker.last_words()
                self.end()
                raise WorkerError(
                    f"The worker process for rank {worker.rank} did not start within "
                    f"{START_TIMEOUT_S:.0f} s.\n{said}",
                    worker.rank,
                    said,
                )

    @property
    def count(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    @property
    def usable(self) -> bool:
        """Whether all workers live, in the process that started them."""
        return (
            bool(self._workers)
            and self.owner == os.getpid()
            and all(worker.process.poll() is None for worker in self._workers)
        )

    def begin(self, payload: Payload, size: int) -> None:
        """Let every worker begin a call."""
        self.number += 1
        self._began = time.monotonic()
        # From rank 0's state, without a draw: its numbers stay those of one process.
        seed = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        for worker in self._workers:
            worker.send(
                Call(
                    number=self.number, rank=worker.rank, size=size, folder=str(self._folder.path),
                    seed=seed + worker.rank, threads=share_of_cores(size), data=payload.data,
                    file_count=len(payload.files), working_folder=os.getcwd(), path=list(sys.path),
                )
            )  # fmt: skip
            worker.send_files(payload.files)

    @property
    def room(self) -> Store:
        """Where the ranks meet for this call."""
        return self._folder.store(self.number)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """End what workers leave behind as soon as they have gone.

        Their DataLoader workers hold copies of their connections, and so rank 0 wouldn't be told.
        """
        over = threading.Event()

        def watch() -> None:
            gone: dict[int, float] = {}
            while not over.wait(WATCH_S):
                for worker in self._workers:
                    if worker.rank not in gone and worker.process.poll() is not None:
                        gone[worker.rank] = time.monotonic()
                        worker.end_children()
                if gone and time.monotonic() - min(gone.values()) > GRACE_S:
                    world.abort()

        thread = threading.Thread(target=watch, name="fitkit-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait_for(self, kind: str) -> None:
        """Wait until every worker has reported that.

        Raises:
            WorkerError: one failed, or doesn't in time.
        """
        deadline = time.monotonic() + REPORTS_S[kind]
        for worker in self._workers:
            report = worker.receive(deadline - time.monotonic())
            if report is None or report.kind != kind:
                raise self._error(worker, report)

    def close_room(self) -> None:
        """End the place where the ranks of a call met."""
        self._folder.forget(self.number)

    def failure_behind(self, error: BaseException) -> WorkerError | None:
        """The worker's failure that made rank 0 fail; None where rank 0 failed by itself."""
        if isinstance(error, WorkerError):
            return error
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return None
        broken = is_collateral(error)
        if isinstance(error, ConfigurationError) and not broken:
            return None  # what was asked can't be, on no rank
        told = self._told(REPORT_TIMEOUT_S if broken else 0.0)
        own = "".join(traceback.format_exception_only(error)).strip()
        for worker, report in told:
            if report is not None and not report.collateral:
                # Where all ranks raise one error (a file that can't be written), it is rank 0's.
                return None if report.error == own else self._error(worker, report)
        if not broken:
            return None
        for worker, report in told:
            if report is None:  # it went without a word
                return self._error(worker, None)
        return self._stuck(error, told)

    def _told(self, seconds: float) -> list[tuple[WorkerProcess, Report | None]]:
        """What workers say of their failures within some seconds; the first own one ends the wait.

        A worker that has gone without a word is there with None; one that still works isn't.
        """
        deadline = time.monotonic() + seconds
        told: list[tuple[WorkerProcess, Report | None]] = []
        waiting = list(self._workers)
        while waiting:
            ready = wait([w.connection for w in waiting], max(deadline - time.monotonic(), 0.0))
            for worker in [w for w in waiting if w.connection in ready]:
                report = worker.receive(0.0)
                if report is None or report.kind == "failed":
                    waiting.remove(worker)
                    told.append((worker, report))
            if not ready or any(report and not report.collateral for _, report in told):
                break
        return told

    def _error(self, worker: WorkerProcess, report: Report | None) -> WorkerError:
        rank = worker.rank
        if report is not None and report.kind == "failed":
            return WorkerError(
                f"Rank {rank} failed: {report.error}\n\nIts traceback:\n{report.text}",
                rank,
                report.text,
            )
        said = worker.last_words()
        how = worker.how_it_ended()
        return WorkerError(f"Rank {rank} {how}.{said and chr(10) + said}", rank, said)

    def _stuck(
        self, error: BaseException, told: list[tuple[WorkerProcess, Report | None]]
    ) -> WorkerError:
        """An exchange took too long although all ranks live: say where each of them is.

        Args:
            told: workers that gave up an exchange themselves.
        """
        gave_up = {worker.rank: report.text for worker, report in told if report is not None}
        asked = [worker for worker in self._workers if worker.rank not in gave_up]
        if not asked:
            others = [report.error for _, report in told if report is not None]
            return self._broken(error, others, gave_up)
        for worker in asked:
            with contextlib.suppress(OSError):
                worker.send("where")
        stacks = {}
        for worker in asked:
            report = worker.receive(ANSWER_S)
            stacks[worker.rank] = report.text if report and report.kind == "where" else None
        silent = [rank for rank, stack in stacks.items() if stack is None]
        outside = [r for r, s in stacks.items() if s is not None and "torch/distributed" not in s]
        rank = (silent or outside or list(stacks))[0]
        text = "\n".join(
            f"Rank {rank} is here:\n{stack}" if stack else f"Rank {rank} does not answer."
            for rank, stack in stacks.items()
        )
        return WorkerError(
            f"Rank {rank} did not take part in an exchange in time ({first_line(error)}).\n{text}",
            rank,
            text,
        )

    def _broken(
        self, error: BaseException, others: list[str], places: dict[int, str]
    ) -> WorkerError:
        """All ranks' exchanges broke off: they waited for different ones, or were cut."""
        places = {0: "".join(traceback.format_exception(error)), **places}
        text = "\n".join(f"Rank {rank} waited here:\n{place}" for rank, place in places.items())
        seconds = time.monotonic() - self._began
        failure = broken_exchange(max(places), error, others, text, seconds)
        return WorkerError(f"{failure.what}\n{text}", failure.rank, text)

    def end(self) -> None:
        """End the workers now."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        self._folder.remove()


_pool: Pool | None = None
_calls = threading.RLock()
"""Held by the thread whose call the workers take part in; calls of other models' wait."""


def _pool_of(count: int) -> Pool:
    """The living pool of that many workers, or a new one."""
    global _pool
    if _pool is None or not _pool.usable or _pool.count != count:
        end_workers()
        _pool = Pool(count)
    return _pool


def end_workers() -> None:
    """End all worker processes of this process; the next call starts new ones."""
    global _pool
    if _pool is not None and _pool.owner == os.getpid():
        _pool.end()
    _pool = None


atexit.register(end_workers)
