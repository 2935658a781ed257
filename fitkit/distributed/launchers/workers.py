"""The launcher of `ddp_spawn`: the caller's process is rank 0, workers hold the other ranks.

Workers live on between calls, leave with this process, and need no `__main__` guard: they don't
import the script. What a call needs is sent by `payload.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fitkit.distributed.launchers.cores import share_of_cores, threads_shared
from fitkit.distributed.launchers.interrupts import ended_by_interrupt
from fitkit.distributed.launchers.payload import Payload
from fitkit.distributed.launchers.worker import FILES_AT_A_TIME, Call, Report, is_collateral
from fitkit.errors import WorkerError

if TYPE_CHECKING:
    from fitkit.distributed.strategies.base import Strategy

Result = TypeVar("Result")

START_TIMEOUT_S = 120.0
"""A worker imports torch first, which takes long on a busy machine."""
REPORT_TIMEOUT_S = 5.0
"""How long rank 0 waits for the word of a rank that broke off an exchange."""
START = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('FITKIT_PATH')); "
    "from fitkit.distributed.launchers.worker import main; main({}, {})"
)


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
        with contextlib.closing(self._payload(function, arguments)) as payload:
            pool = _pool_of(self.size - 1)
            store = TCPStore("127.0.0.1", 0, self.size, True, wait_for_workers=False)
            pool.begin(payload, store.port, self.size)
        try:
            with ended_by_interrupt(pool.end), threads_shared(self.size):
                self.strategy.join(PrefixStore(f"call{pool.number}", store))
                result = function(*arguments)
                self.strategy.leave()
            pool.finish()
        except BaseException as error:
            failure = pool.failure_behind(error)
            pool.end()
            self.strategy.leave()
            if failure is None:
                raise
            raise failure from error
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
        self._workers = [_Process(rank) for rank in range(1, count + 1)]
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

    def begin(self, payload: Payload, port: int, size: int) -> None:
        """Let every worker begin a call."""
        self.number += 1
        # From rank 0's state, without a draw: its numbers stay those of one process.
        seed = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        for worker in self._workers:
            worker.send(
                Call(
                    number=self.number, rank=worker.rank, size=size, port=port,
                    seed=seed + worker.rank, threads=share_of_cores(size), data=payload.data,
                    file_count=len(payload.files), folder=os.getcwd(), path=list(sys.path),
                )
            )  # fmt: skip
            worker.send_files(payload.files)

    def finish(self) -> None:
        """Wait until every worker is done.

        Raises:
            WorkerError: one failed, or isn't done in time.
        """
        deadline = time.monotonic() + 60.0
        for worker in self._workers:
            report = worker.receive(deadline - time.monotonic())
            if report is None or report.kind != "done":
                raise self._error(worker, report)

    def failure_behind(self, error: BaseException) -> WorkerError | None:
        """The worker's failure that made rank 0 fail; None where rank 0 failed by itself."""
        if isinstance(error, WorkerError):
            return error
        if isinstance(error, KeyboardInterrupt):
            return None
        broken = is_collateral(error)
        told = self._told(REPORT_TIMEOUT_S if broken else 0.0)
        for worker, report in told:
            if report is not None and not report.collateral:
                return self._error(worker, report)
        if not broken:
            return None
        for worker, report in told:
            if report is None:  # it went without a word
                return self._error(worker, None)
        return self._stuck(error)

    def _told(self, seconds: float) -> list[tuple[_Process, Report | None]]:
        """What workers say of their failures within some seconds; the first own one ends the wait.

        A worker that has gone without a word is there with None; one that still works isn't.
        """
        deadline = time.monotonic() + seconds
        told: list[tuple[_Process, Report | None]] = []
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

    def _error(self, worker: _Process, report: Report | None) -> WorkerError:
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

    def _stuck(self, error: BaseException) -> WorkerError:
        """An exchange took too long although all ranks live: say where each of them is."""
        stacks = {}
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.send("where")
        for worker in self._workers:
            report = worker.receive(2.0)
            stacks[worker.rank] = report.text if report and report.kind == "where" else None
        silent = [rank for rank, stack in stacks.items() if stack is None]
        outside = [r for r, s in stacks.items() if s is not None and "torch/distributed" not in s]
        rank = (silent or outside or list(stacks))[0]
        told = "\n".join(
            f"Rank {rank} is here:\n{stack}" if stack else f"Rank {rank} does not answer."
            for rank, stack in stacks.items()
        )
        return WorkerError(
            f"Rank {rank} did not take part in an exchange in time ({error}).\n{told}", rank, told
        )

    def end(self) -> None:
        """End the workers now."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()


class _Process:
    """A worker process as its parent sees it."""

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

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Its own session: DataLoader workers go with it.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thing in (self.connection, self._files, self._said):
            thing.close()


_pool: Pool | None = None


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
