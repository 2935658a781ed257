"""How ranks learn of each other's failures, and what becomes of a rank's process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistBackendError, HashStore

from fitkit.errors import WorkerError
from fitkit.extras import whereabouts
from fitkit.extras.launchers import asking, watch
from fitkit.extras.launchers.process import RankProcess
from fitkit.extras.launchers.watch import (
    Failure,
    Watch,
    broken_exchange,
    shows_broken_exchange,
)
from fitkit.extras.whereabouts import Standing
from fitkit.pulse import heard, running
from tests.limits import patience

CUT = RuntimeError("[../gloo.cc:99] Connection closed by peer [127.0.0.1]:1234")


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    for name, seconds in {"PERIOD_S": 0.05, "SILENCE_S": 0.3, "ANSWER_S": 0.2}.items():
        monkeypatch.setattr(watch, name, seconds)
    monkeypatch.setattr(asking, "ANSWER_S", 0.2)


def on_ranks(size, act, lost=lambda: None, **options):
    """What `act(rank, watch)` gives on each rank; the ranks are threads."""
    store, ended = HashStore(), []

    def run(rank):
        with Watch(store, rank, size, lost, lambda: ended.append(rank), False, **options) as own:
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


TIMED_OUT = RuntimeError("Timed out waiting 2000ms for recv operation to complete")


def at_one_place(error):
    try:
        raise error
    except RuntimeError:
        return error


def at_another_place(error):
    try:
        raise error
    except RuntimeError:
        return error


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([CUT, CUT], "connection between ranks was closed although no rank failed"),
        (
            [at_one_place(TIMED_OUT), at_another_place(RuntimeError(*TIMED_OUT.args))],
            "in different exchanges until 2 s .*is_global_zero.*FK043",
        ),
        ([at_one_place(RuntimeError(*TIMED_OUT.args))] * 2, "same exchange until 2 s .*network"),
        (
            [at_one_place(RuntimeError(*CUT.args)), at_one_place(RuntimeError(*TIMED_OUT.args))],
            "Rank 0 came to an exchange more than 2 s after rank 1",
        ),
        ([TypeError("Timed out"), TypeError("Timed out")], "waited for each other until the"),
    ],
    ids=["closed", "different", "network", "late", "unknown"],
)
def test_exchanges_broken_on_all_ranks_are_shown_with_every_ranks_place(errors, words):
    def act(rank, own):
        assert own.cause(errors[rank]) is None
        return broken_exchange(rank, errors[rank], own)

    for failure in on_ranks(2, act):
        assert re.match(f".*{words}", failure.what), failure.what
        assert failure.text.startswith("  rank 0: ") and "\n  rank 1: " in failure.text
        assert "Rank 0 waited here" in failure.text and "Rank 1 waited here" in failure.text


def test_ranks_that_do_not_move_are_shown_at_once_and_less_often_later(capsys):
    def act(rank, own):
        with running("fit", alone=False):
            heard(iter(()), "training", epoch=1)
            time.sleep(2)  # here both are

    on_ranks(2, act, quiet_s=0.2)
    shown = capsys.readouterr().err
    assert 1 <= shown.count("no batch for") <= 4
    assert "(fit, epoch 2). Each rank's place:\n  rank 0, batch 0: is in act, " in shown
    assert "\n  rank 1, batch 0: is in act, " in shown and "# here both are" in shown


def test_nothing_is_shown_while_a_rank_moves_or_where_that_is_switched_off(capsys):
    def act(rank, own):
        with running("fit", alone=False):
            for _ in heard(iter(range(20)), "training", epoch=0):
                time.sleep(0.1 if rank else 0.0)
            time.sleep(0.0 if rank else 2.0)

    on_ranks(2, act, quiet_s=1.0)
    on_ranks(2, act)
    assert capsys.readouterr().err == ""


def test_ranks_that_wait_for_each_other_are_ended_at_the_third_look(monkeypatch, capsys):
    def here(still):
        place = f"place {still.thread}"
        return Standing("fit", 1, still.look(), 0.0, "exchange", f"waits at {place}", place, "st")

    monkeypatch.setattr(whereabouts, "standing", here)
    deadline = time.monotonic() + patience(30)

    def act(rank, own):
        while own.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return own.failure

    for failure in on_ranks(3, act, quiet_s=0.2, sees_waits=True):
        assert re.search(r"none will go on\. .*is_global_zero.*FK043", failure.what)
        assert failure.text.count(" waited here:\nst") == 3
    assert capsys.readouterr().err.count("none will go on") == 3


def test_a_rank_that_makes_no_backward_pass_is_named_within_seconds(monkeypatch, capsys):
    monkeypatch.setattr(asking, "SOON_S", 0.2)
    monkeypatch.setattr(asking, "AGAIN_S", 0.1)
    waits_in = {}

    def here(still):
        function = waits_in[still.thread]
        stack = f"  File x, line 1, in {function}\n"
        return Standing("fit", 1, still.look(), 0.0, "exchange", function, function, stack)

    monkeypatch.setattr(whereabouts, "standing", here)
    deadline = time.monotonic() + patience(30)

    def act(rank, own):
        waits_in[threading.get_ident()] = "reduced" if rank == 1 else "manual_backward"
        while own.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return own.failure

    for failure in on_ranks(3, act, quiet_s=60.0, sees_waits=True, is_near=True):
        assert "Rank 1 made no backward pass where rank 0 did." in failure.what
        assert failure.as_error().code == "FK043"
    assert capsys.readouterr().err == ""  # the error has the places


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
            "Rank 1 was ended by SIGKILL (out of memory?). (FK041: python -m fitkit explain FK041)",
        ),
        ("import sys; print('last', file=sys.stderr); sys.exit(3)", "Rank 1 left with status 3."),
        (
            "import os, sys; print('op.preamble.length', file=sys.stderr, flush=True); os.abort()",
            "Rank 1 was ended by SIGABRT: gloo ends a process to which another sends more than it "
            "waits for, so the ranks met in different exchanges. One of them makes a call that the "
            "others don't, for example a backward pass. (FK043: python -m fitkit explain FK043)",
        ),
    ],
)
def test_a_process_that_has_ended_says_how(code, words):
    process = started(code)
    assert process.ends_before(time.monotonic() + patience(30))
    failure = process.failure()
    assert (failure.rank, failure.what) == (1, words)
    said = re.search("print.'([a-z.]+)'", code)
    assert failure.text.strip() == (said[1] if said else "")


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
