"""Jobs on worker processes: as many at once as there are cores or GPUs.

A job is plain data, and so is its result; both travel as JSON. The work is a function, which comes
once to each worker, with its data in memory that all of them share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fitkit.arguments import check_count
from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.launchers.other_ranks import end_own_session, end_with_parent
from fitkit.extras.launchers.payload import Payload
from fitkit.extras.launchers.payload import load as load_payload
from fitkit.extras.launchers.process import RankProcess, open_standard_files
from fitkit.extras.launchers.script_objects import script, take_part
from fitkit.random_states import kept_random_numbers
from fitkit.seams.machines import Machine, usable_cores

START_S = 120.0
"""How long a worker may take to start; importing torch is slow on a busy machine."""
LOOK_S = 1.0
"""How often to look whether workers live: processes that one has left behind may hold its
connection open."""
FILES_AT_A_TIME = 200
"""How many files one message carries; Unix sockets pass at most 253."""

Job = dict[str, Any]
Ask = Callable[[Any], Any]
Work = Callable[[Job, Ask], Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        job: the job.
        value: what the work returned; None if it failed.
        error: why it failed, in a line; "" if it didn't.
        trace: the traceback, or the last words of a process that died.
    """

    job: Job
    value: Any = None
    error: str = ""
    trace: str = ""

    @classmethod
    def of_error(cls, job: Job, error: Exception) -> Outcome:
        """Return that of work that has raised."""
        said = str(error).strip()
        return cls(
            job, None, f"{type(error).__name__}: {said}", "".join(traceback.format_exception(error))
        )


def places(workers: object, threads: int) -> list[dict[str, str]]:
    """Return the environment variables of each worker; one for each run at once.

    Args:
        workers: how many, or `"auto"`: a GPU for each, or without GPUs as many as the cores have
            room for.
        threads: that a worker computes with on the CPU.

    Raises:
        ArgumentTypeError, ConfigurationError: it is no such number.
    """
    cuda = Machine.here().cuda_count
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in seen.split(",") if name.strip()]
    names = names if len(names) >= cuda else [str(index) for index in range(cuda)]
    if workers == "auto":
        others = any(Machine.here().count(kind) for kind in Machine.here().kinds("gpu"))
        cores = (usable_cores() or os.cpu_count() or 1) // threads
        count = cuda or (1 if others or sys.platform == "win32" else max(cores, 1))
    else:
        count = check_count("workers", workers)
    own = {"OMP_NUM_THREADS": str(threads)}
    return [
        {**own, "CUDA_VISIBLE_DEVICES": names[place % cuda]} if cuda else own
        for place in range(count)
    ]


def outcomes(
    work: Work,
    jobs: Iterator[Job],
    places: list[dict[str, str]],
    threads: int,
    answer: Callable[[Job, Any], Any],
) -> Iterator[Outcome]:
    """Do jobs, and yield what came of each, as they end. A job that fails is one of these.

    With one place the jobs are done in this process, one after the other. Otherwise each place has
    a process. They are ended when the iterator is closed, or when it raises.

    Args:
        work: called with a job, and a function by which it may ask the caller something.
        jobs: asked for a job each time a worker is free.
        places: from `places`.
        threads: that work computes with on the CPU.
        answer: called with the job and what its work asks; it returns the answer.

    Raises:
        ConfigurationError: the work can't be sent to a process, or not be loaded there.
        WorkerError: a process didn't start.
    """
    if len(places) == 1:
        yield from _done_here(work, jobs, threads, answer)
        return
    payload = _payload(work)
    with contextlib.closing(payload), contextlib.ExitStack() as ends:
        running: dict[Connection, tuple[_Worker, Job]] = {}
        idle = list(enumerate(places))
        asked = True  # whether there may be another job
        while True:
            while idle and asked:
                job = next(jobs, None)
                if job is None:
                    asked = False
                    break
                place, variables = idle.pop()
                worker = _Worker(place, len(places), variables, payload)
                ends.callback(worker.end)
                running[worker.connection] = worker, job
                worker.send(job)
            if not running:
                return
            for connection in wait([*running], LOOK_S) or [*running]:
                assert isinstance(connection, Connection)
                worker, job = running[connection]
                found = worker.read(job, answer)
                if found is None:
                    continue
                yield found
                following = next(jobs, None) if worker.lives() else None
                if following is not None:
                    running[connection] = worker, following
                    worker.send(following)
                    continue
                del running[connection]
                if worker.lives():
                    asked = False
                else:  # another process takes its place
                    idle.append((worker.rank, worker.variables))
                    asked = True
                worker.end()


def _payload(work: Work) -> Payload:
    try:
        return Payload(work, (), {"the run": work})
    except ConfigurationError as error:
        what = str(error).partition(" Create it where")[0]
        raise ConfigurationError(
            f"{what} Create it in the function that builds the model, or write workers=1, which "
            "runs in this process.",
            code="FK046",
        ) from error


def _done_here(
    work: Work, jobs: Iterator[Job], threads: int, answer: Callable[[Job, Any], Any]
) -> Iterator[Outcome]:
    for job in jobs:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with kept_random_numbers():
                found = Outcome(job, work(job, functools.partial(answer, job)))
        except Exception as error:
            found = Outcome.of_error(job, error)
        finally:
            torch.set_num_threads(before)
        yield found


START = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('FITKIT_PATH')); "
    "from fitkit.extras.trials.pool import main; main({}, {})"
)


class _Worker(RankProcess):
    """A process that does jobs.

    Args:
        place: its number.
        count: how many there are.
        variables: of its environment.
        payload: the work.

    Attributes:
        connection: what it says comes from here.
    """

    def __init__(self, place: int, count: int, variables: dict[str, str], payload: Payload) -> None:
        open_standard_files()
        self.variables = variables
        ours, theirs = socket.socketpair()
        with ours, theirs:
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            start = START.format(theirs.fileno(), len(payload.files))
            super().__init__(
                place,
                count,
                [sys.executable, *flags, "-c", start],
                {**variables, "FITKIT_PATH": json.dumps(sys.path)},
                files=(theirs.fileno(),),
            )
            self.connection = Connection(os.dup(ours.fileno()))
        self._payload: Payload | None = payload  # until it has it
        self._late = time.monotonic() + START_S
        self._job: Job | None = None  # that it gets as soon as it has the work

    def send(self, job: Job) -> None:
        """Give it a job."""
        if self._payload is None:
            self._say(job)
        else:
            self._job = job

    def _say(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended; `read` says how
            self.connection.send_bytes(json.dumps(message).encode())

    def _give_work(self) -> None:
        """Send it the work, and its first job. Only then: it reads them now."""
        assert self._payload is not None
        files, data = self._payload.files, self._payload.data
        self._payload = None
        with contextlib.suppress(OSError):
            self.connection.send((os.getcwd(), script(), data))
            with socket.socket(fileno=os.dup(self.connection.fileno())) as own:
                for first in range(0, len(files), FILES_AT_A_TIME):
                    socket.send_fds(own, [b"f"], files[first : first + FILES_AT_A_TIME])
        self._say(self._job)

    def read(self, job: Job, answer: Callable[[Job, Any], Any]) -> Outcome | None:
        """Read what it says, if it says something; answer what it asks.

        Returns:
            What came of its job; None while it is at it.

        Raises:
            ConfigurationError: it can't load the work.
            WorkerError: it didn't start.
        """
        while True:
            try:
                if not self.connection.poll():
                    if not self.lives():
                        return self._lost(job)
                    if self._payload is not None and time.monotonic() > self._late:
                        raise WorkerError(f"A worker process did not start within {START_S:.0f} s.")
                    return None
                kind, told = json.loads(self.connection.recv_bytes())
            except (EOFError, ConnectionError):
                return self._lost(job)
            if kind == "ready":
                self._give_work()
            elif kind == "asks":
                self._say(answer(job, told))
            elif kind == "broken":
                raise ConfigurationError(
                    f"A worker process can't load what it has to run: {told['error']}\n\n"
                    f"{told['trace']}"
                )
            else:
                return Outcome(job, **told)

    def _lost(self, job: Job) -> Outcome:
        """Return the outcome of a job whose process has died, and end what is left of it."""
        self.ends_before(time.monotonic() + LOOK_S)
        failure = self.failure()
        words = self.words()
        self.end()
        if self._payload is not None:
            raise WorkerError(f"A worker process ended as it started.\n{words}", 0, words)
        what = "Its process cut its connection." if failure is None else failure.what
        return Outcome(job, None, what.replace(f"Rank {self.rank}", "Its process"), words)

    def end(self) -> None:
        super().end()
        self.connection.close()


def main(file: int, files: int) -> None:
    """Do jobs in a worker process; this never returns.

    Args:
        file: the file descriptor of the connection.
        files: how many files of shared memory come with the work.
    """
    end_with_parent()
    received = socket.socket(fileno=os.dup(file))
    connection = Connection(file)

    def say(kind: str, told: Any) -> None:
        connection.send_bytes(json.dumps([kind, told]).encode())

    def ask(question: Any) -> Any:
        say("asks", question)
        return json.loads(connection.recv_bytes())

    say("ready", None)
    try:
        folder, program, data = connection.recv()  # from the process that started this one
        shared: list[int] = []
        while len(shared) < files:
            _, new, _, _ = socket.recv_fds(received, 1, FILES_AT_A_TIME)
            if not new:
                end_own_session()
            shared += new
        with contextlib.suppress(OSError):
            os.chdir(folder)
        try:
            work, named = load_payload(data, shared)
            take_part(program, named)
        except Exception as error:
            say("broken", _plain(Outcome.of_error({}, error)))
            raise
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        while True:
            job = json.loads(connection.recv_bytes())
            try:
                found = Outcome(job, work(job, ask))
            except Exception as error:
                found = Outcome.of_error(job, error)
            say("ends", _plain(found))
    except (EOFError, OSError):  # the parent has gone
        end_own_session()


def _plain(found: Outcome) -> dict[str, Any]:
    return {"value": found.value, "error": found.error, "trace": found.trace}
