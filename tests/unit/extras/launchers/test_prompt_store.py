"""The store that gloo gets: its waits see a key at once and can be ended; few requests for many."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, FileStore, HashStore, PrefixStore, TCPStore

from fitkit.errors import WorkerError
from fitkit.extras.launchers import watch
from fitkit.extras.launchers.meeting import Meeting
from fitkit.extras.launchers.stores import REQUESTS_PER_S, Patience, PromptStore, longest_pause
from fitkit.extras.launchers.watch import Watch
from tests.limits import patience
from tests.unit.extras.launchers.test_meeting import on_ranks

LONG = timedelta(seconds=20)


@pytest.fixture(params=["file", "server", "part of a server"])
def store(request, tmp_path):
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    server = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    return server if request.param == "server" else PrefixStore("part", server)


class Noting(HashStore):
    """A store that notes which keys it is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def clone(self):
        return self

    def check(self, keys):
        self.asked.append(list(keys))
        return super().check(keys)


def test_a_wait_ends_when_the_key_is_there(store):
    prompt = PromptStore(store, 2)
    threading.Timer(0.1, store.set, ("key", "value")).start()
    prompt.wait(["key"], LONG)
    assert prompt.get("key") == b"value"


def test_a_wait_for_what_never_comes_ends_in_time(store):
    with pytest.raises(DistStoreError, match=r"wait timeout after 0\.2 s, keys: key"):
        PromptStore(store, 2).wait(["key"], timedelta(seconds=0.2))


def test_a_wait_can_be_ended(store):
    prompt = PromptStore(store, 2)
    threading.Timer(0.1, prompt.end_waits).start()
    began = time.monotonic()
    with pytest.raises(DistStoreError, match="the wait was interrupted, keys: key"):
        prompt.wait(["key"], timedelta(seconds=600))
    assert time.monotonic() - began < patience(30)


def test_many_ranks_pause_longer_so_that_a_store_has_so_many_requests_a_second():
    assert longest_pause(8, 2, 0.5) == longest_pause(512, 2, 0.5) == 0.5
    assert longest_pause(5000, 2, 0.5) == 5000 * 2 / REQUESTS_PER_S
    assert Patience(20, 0.01, 64).longest_s == 0.01
    assert Patience(20, 0.01, 4096).longest_s == 4096 / REQUESTS_PER_S
    assert Patience(20, ranks=4096, requests=3).longest_s == 4096 * 3 / REQUESTS_PER_S


def test_rank_0_asks_for_each_rank_only_when_somebody_has_come():
    size, common = 40, Noting()
    meeting = Meeting(0, size, "fit", timedelta(seconds=0.6))
    with pytest.raises(WorkerError, match="missing: rank 1"):
        meeting._open_part(HashStore(), common)
    # Its first look asks for each rank's question and end; all others look at counts alone.
    assert len(common.asked) == 2 * (size - 1)


def test_one_silent_rank_among_many_is_found_by_few_requests(monkeypatch):
    for name, seconds in {"PERIOD_S": 60.0, "SILENCE_S": 0.3, "ANSWER_S": 0.2}.items():
        monkeypatch.setattr(watch, name, seconds)
    size, silent = 64, 37
    store = Noting()

    def seek(rank):
        if rank == silent:
            return None
        with Watch(store, rank, size, lambda: None, lambda: None, False) as own:
            return own.cause(RuntimeError("Connection closed by peer"))

    for rank, failure in enumerate(on_ranks(seek, size)):
        assert rank == silent or f"Rank {silent} doesn't answer" in failure.what
    sought = [keys for keys in store.asked if keys[0].startswith("broke/")]
    assert len(sought) <= (size - 1) * 2 * 7  # halves of halves, not each of the others


def test_of_many_ranks_the_first_s_words_are_shown_and_a_few_others(monkeypatch):
    for name, seconds in {"SILENCE_S": 0.6, "ANSWER_S": 0.2}.items():
        monkeypatch.setattr(watch, name, seconds)
    store = HashStore()

    def seek(rank):
        time.sleep(0.0 if rank == 20 else 0.3)
        words = "Timed out waiting" if rank == 20 else "Connection closed by peer"
        with Watch(store, rank, 24, lambda: None, lambda: None, False) as own:
            assert own.cause(RuntimeError(words)) is None
            return own.elsewhere

    for rank, elsewhere in enumerate(on_ranks(seek, 24)):
        assert len(elsewhere) == watch.SHOWN
        assert rank == 20 or elsewhere[20][0] == "Timed out waiting"
