"""How ranks learn of each other's failures, and what becomes of a rank's process."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistBackendError, HashStore

from fitkit.distributed.launchers import watch
from fitkit.distributed.launchers.watch import (
    Failure,
    Watch,
    broken_exchange,
    shows_broken_exchange,
)
from fitkit.errors import WorkerError
from fitkit.extras.launchers.process import RankProcess
from tests.limits import patience

CUT = RuntimeError("[../gloo.cc:99] Connection closed by peer [127.0.0.1]:1234")


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    for name, seconds in {"PERIOD_S": 0.05, "SILENCE_S": 0.3, "ANSWER_S": 0.2}.items():
        monkeypatch.setattr(watch, name, seconds)


def on_ranks(size, act, lost=lambda: None):
    """What `act(rank, watch)` gives on each rank; the ranks are threads."""
    store, ended = HashStore(), []

    def run(rank):
        with Watch(store, rank, size, lost, lambda: ended.append(rank), False) as own:
            return act(rank, own)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_the_first_failure_is_every_rank_s():
    def act(rank, own):
        if rank == 1:
            return own.report(Failure.of(1, KeyError("mine")))
        return own.cause(CUT)

    for failure in on_ranks(3, act):
        assert (failure.rank, failure.raised) == (1, True)
        assert failure.what == "Rank 1 failed: KeyError: 'mine'"


def test_an_error_that_another_rank_has_told_of_is_told_as_it_is():
    error = Failure(2, "Rank 2 failed: E", "its traceback", raised=True).as_error("1 of 3. ")
    again = Failure.of(0, error).as_error()
    assert str(again) == str(error) == "1 of 3. Rank 2 failed: E\n\nIts traceback:\nits traceback"
    assert isinstance(again, WorkerError)
    assert (again.rank, again.remote_traceback) == (2, "its traceback")


def test_a_rank_that_goes_on_is_named_with_its_place():
    over = []

    def act(rank, own):
        if rank == 0:
            try:
                return own.cause(CUT)
            finally:
                over.append(True)
        while not over:
            time.sleep(0.01)

    failure = on_ranks(2, act)[0]
    assert failure.what.startswith("Rank 1 did not take part in an exchange in time (Connection")
    assert "while not over" in failure.text or "time.sleep(0.01)" in failure.text


def test_a_rank_that_does_not_answer_is_named():
    def act(rank, own):
        return own.cause(CUT) if rank == 0 else None  # its watch is over, as if it had ended

    assert "Rank 1 doesn't answer" in on_ranks(2, act)[0].what


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CUT, "connection between ranks was closed although no rank failed"),
        (RuntimeError("Timed out waiting 2000ms for recv"), "in different exchanges"),
    ],
)
def test_exchanges_broken_on_all_ranks_are_shown_with_every_rank_s_place(error, words):
    def act(rank, own):
        assert own.cause(error) is None
        return broken_exchange(rank, error, own)

    for failure in on_ranks(2, act):
        assert words in failure.what
        assert "Rank 0 waited here" in failure.text and "Rank 1 waited here" in failure.text


def test_only_errors_of_exchanges_show_a_broken_one():
    assert shows_broken_exchange(CUT) and shows_broken_exchange(DistBackendError("anything"))
    assert not shows_broken_exchange(ValueError("gloo"))
    assert not shows_broken_exchange(ConnectionResetError("reset"))
    error = ValueError("wrapped")
    error.__cause__ = CUT
    assert shows_broken_exchange(error)


def started(code):
    return RankProcess(1, 2, [sys.executable, "-S", "-c", code], {})


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "Rank 1 was ended by SIGKILL (out of memory?). (FK041: docs/troubleshooting.md#fk041)",
        ),
        ("import sys; print('last', file=sys.stderr); sys.exit(3)", "Rank 1 left with status 3."),
    ],
)
def test_a_process_that_has_ended_says_how(code, words):
    process = started(code)
    assert process.ends_before(time.monotonic() + patience(30))
    failure = process.failure()
    assert (failure.rank, failure.what) == (1, words)
    assert failure.text.strip() == ("last" if "last" in code else "")


def test_what_a_process_has_started_ends_with_it():
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, file=sys.stderr)
"""
    process = started(code)
    assert process.failure() is None or not process.lives()
    assert process.ends_before(time.monotonic() + patience(30))
    child = int(process.words())
    os.kill(child, 0)  # it lives
    assert process.failure() is not None
    deadline = time.monotonic() + patience(10)
    while state(child) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(process):
    command = ["ps", "-o", "stat=", "-p", str(process)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()[:1]


def test_a_process_that_goes_on_is_ended():
    process = started("import time; time.sleep(600)")
    assert process.lives() and process.failure() is None
    assert not process.ends_before(time.monotonic() + 0.1)
    process.end()
    process.end()
    assert not process.lives()
    assert process.failure().what.startswith(f"Rank 1 was ended by {signal.Signals(9).name}")
