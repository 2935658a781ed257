"""One process's calls are watched by a thread, and not those that ranks watch themselves."""

import time

import pytest

from fitkit.pulse import heard, running
from fitkit.training import lone_watch
from tests.limits import patience


@pytest.fixture(autouse=True)
def watching(monkeypatch):
    monkeypatch.setenv("FITKIT_SILENCE", "0.2")
    with running("evaluate", alone=True):
        lone_watch.watch_calls()
        yield


def test_a_call_that_stands_still_is_shown(capsys):
    heard(iter(()), "test")
    deadline, shown = time.monotonic() + patience(20), ""
    while not shown and time.monotonic() < deadline:
        time.sleep(0.05)
        shown += capsys.readouterr().err
    assert "(evaluate), batch 0: is in " in shown


def test_a_call_of_several_ranks_is_left_to_them(capsys):
    with running("fit", alone=False):
        heard(iter(()), "training", epoch=0)
        with running("predict", alone=True):  # within it
            time.sleep(1)
    assert capsys.readouterr().err == ""
