"""How launched processes meet: ranks as threads, with real stores."""

import http.server
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from fitkit.distributed.cluster import Cluster
from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.launchers import launched, meeting
from fitkit.extras.launchers import private_folder as folders
from fitkit.extras.launchers.launched import (
    AddressFile,
    launch_name,
    meet_launched,
    shared_address,
)
from fitkit.extras.launchers.meeting import Meeting
from fitkit.extras.launchers.private_folder import private_folder
from fitkit.extras.launchers.watch import Failure
from tests.limits import patience

SECONDS = timedelta(seconds=10)
SHORT = timedelta(seconds=0.4)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    monkeypatch.setattr(meeting, "LINGER_S", 0.2)
    yield
    launched._reached.clear()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cluster(rank, size=2, launcher="slurm", address="127.0.0.1", port=None, nodes=1):
    return Cluster(launcher, rank, rank, size, size, 0, nodes, address, port)


def on_ranks(call, size=2):
    """`call(rank)` on all ranks at once; what each returned or raised."""

    def guarded(rank):
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def store_for(place, timeout, environment=os.environ, verb="fit"):
    return meet_launched(place, verb, timeout, environment)


def meet_in(store, rank, size, verb="fit", timeout=SECONDS):
    return Meeting(rank, size, verb, timeout, "the store").in_part_of(store)


def talk(stores):
    """Whether all ranks' stores are one: what each writes, each reads."""
    for rank, store in enumerate(stores):
        assert not isinstance(store, Exception), store
        store.set(f"from {rank}", str(rank))
    return all(
        store.get(f"from {rank}") == str(rank).encode()
        for store in stores
        for rank in range(len(stores))
    )


def test_ranks_meet_at_the_master_s_address():
    port = free_port()
    stores = on_ranks(lambda rank: store_for(cluster(rank, 3, port=port), SECONDS), 3)
    assert talk(stores)


def test_ranks_on_one_node_meet_without_an_address():
    started = time.monotonic()
    stores = on_ranks(lambda rank: store_for(cluster(rank, launcher="pmi", address=None), SECONDS))
    assert talk(stores)
    assert time.monotonic() - started < patience(3)


def test_each_call_has_a_part_of_its_own():
    port = free_port()
    calls = [on_ranks(lambda rank: store_for(cluster(rank, port=port), SECONDS)) for _ in range(3)]
    assert all(talk(stores) for stores in calls)
    calls[0][0].set("left behind", "1")
    assert not calls[1][0].check(["left behind"])
    assert not calls[2][1].check(["left behind"])


@pytest.mark.parametrize("different", [0, 1, 2])
def test_ranks_that_make_different_calls_are_all_refused(different):
    store = HashStore()
    errors = on_ranks(
        lambda rank: meet_in(store, rank, 3, "fit" if rank == different else "evaluate"), 3
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, ConfigurationError)
        own, others = ("fit", "evaluate") if rank == different else ("evaluate", "fit")
        assert f"This rank ({rank}) calls {own}, but rank" in str(error)
        assert f" calls {others}. Every rank has to make the same calls" in str(error)


def test_a_rank_that_fails_while_it_waits_ends_the_others_wait_with_its_words():
    store = HashStore()

    def meet(rank):
        meeting = Meeting(rank, 3, "fit", SECONDS)
        lost = Failure(2, "Rank 2 was ended by SIGKILL.", "its last words")
        return meeting.at(store, lambda: lost if rank == 0 else None)

    errors = on_ranks(lambda rank: rank < 2 and meet(rank), 3)
    for error in errors[:2]:
        assert isinstance(error, WorkerError) and error.rank == 2
        assert "ranks joined this call of fit. Rank 2 was ended by SIGKILL." in str(error)
        assert str(error).count("its last words") == 1 and error.remote_traceback


def test_one_process_needs_no_port():
    assert isinstance(store_for(cluster(0, 1, address=None), SECONDS), HashStore)


def test_the_agent_s_store_is_used_where_torchrun_serves_one():
    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    stores = on_ranks(
        lambda rank: store_for(
            cluster(rank, launcher="torchrun", port=agent.port), SECONDS, environment
        )
    )
    assert talk(stores)


def test_what_ranks_before_a_restart_left_behind_misleads_nobody():
    store = HashStore()
    common, old = PrefixStore("fitkit/meeting", store), PrefixStore("fitkit/call/old", store)
    # Rank 1 of the last round asked, and had its answer.
    common.set("question/1", "old")
    common.set("answer/old", "fitkit/call/old")
    old.set("here/0", "fit")
    old.set("here/1", "fit")
    old.set("all are here", '{"fit": 0}')

    def late(rank):
        time.sleep(0.3 * rank)
        return meet_in(store, rank, 2)

    assert talk(on_ranks(late))


def test_ranks_that_come_in_any_order_meet():
    store = HashStore()

    def late(rank):
        time.sleep((0.2, 0.0, 0.1)[rank])
        return meet_in(store, rank, 3)

    assert talk(on_ranks(late, 3))


# Someone never comes.


def test_a_rank_that_never_comes_is_named_on_all_others():
    port = free_port()
    errors = on_ranks(
        lambda rank: rank < 2 and store_for(cluster(rank, 3, port=port), timedelta(seconds=0.8)), 3
    )
    for error in errors[:2]:
        assert isinstance(error, WorkerError)
        assert f"2 of 3 processes joined at 127.0.0.1:{port} within 0.8 s" in str(error)
        assert "missing: rank 2" in str(error)


def test_rank_0_alone_says_that_one_joined():
    with pytest.raises(WorkerError, match="1 of 2 processes joined .*missing: rank 1") as caught:
        store_for(cluster(0, port=free_port()), SHORT)
    assert caught.value.rank == 1


def test_without_rank_0_the_address_is_named(capfd):
    port = free_port()
    with pytest.raises(
        WorkerError, match=rf"1 of 2 processes joined: rank 1 .*127.0.0.1:{port} within 0.4 s"
    ):
        store_for(cluster(1, port=port), SHORT)
    assert capfd.readouterr().err == ""  # No C++ stacks.


def test_without_rank_0_and_an_address_the_file_is_named():
    with pytest.raises(WorkerError, match="1 of 2 .*rank 0 wrote no address there"):
        store_for(cluster(1, launcher="pmi", address=None), SHORT)


def test_a_server_that_accepts_and_says_nothing_ends_the_wait_too(monkeypatch):
    monkeypatch.setattr(launched, "OVERDUE_S", 0.1)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(WorkerError, match="1 of 2 .*doesn't answer"):
            store_for(cluster(1, port=mute.getsockname()[1]), SHORT)


def test_ctrl_c_is_heard_while_others_are_awaited():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store_for(cluster(0, port=free_port()), SECONDS)
    assert time.monotonic() - started < patience(2)


def test_after_a_failure_the_next_call_works():
    port = free_port()
    with pytest.raises(WorkerError):
        store_for(cluster(0, port=port), SHORT)
    assert talk(on_ranks(lambda rank: store_for(cluster(rank, port=port), SECONDS)))


def test_a_port_in_use_is_named_at_once():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port}.*in use.*MASTER_PORT"):
            store_for(cluster(0, port=port), SECONDS)


# Where rank 0 leaves its address.


def test_a_file_from_a_killed_run_of_the_same_name_misleads_nobody():
    path = private_folder() / f"{launch_name({})}.address"
    # Its store is still there, say of a run that was not killed whole.
    other = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other.set("fitkit/token", "other")
    path.write_text(f"127.0.0.1:{other.port} stale")

    def late(rank):
        time.sleep(0.3 * (1 - rank))
        return store_for(cluster(rank, launcher="pmi", address=None), SECONDS)

    assert talk(on_ranks(late))
    assert not path.exists()


def test_the_file_goes_also_when_nobody_came():
    with pytest.raises(WorkerError):
        store_for(cluster(0, launcher="openmpi", address=None), SHORT)


def test_an_unfinished_address_is_none(tmp_path):
    shared = AddressFile(tmp_path / "address")
    assert shared.read() is None
    shared.path.write_text("127.0.0.1:40")
    assert shared.read() is None
    shared.write(4000, "token")
    assert shared.read() == ("127.0.0.1", 4000, "token")
    shared.remove()
    shared.remove()


def test_the_folder_is_private_and_a_planted_one_is_refused():
    folder = private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="must belong to this user"):
        private_folder()


def test_a_launch_has_a_name_of_its_own():
    named = {launch_name({"PMIX_NAMESPACE": name}) for name in ("a@1", "a@2", "a/../../1", "a-1")}
    assert len(named) == 4
    assert not any("/" in name or "." in name for name in named)


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_a_shell_around_each_rank_does_not_change_the_name():
    module = "fitkit.extras.launchers.launched"
    code = f"from {module} import launch_name; print(launch_name({{}}))"
    command = f'"{sys.executable}" -c "{code}"; true'

    def name(rank):
        environment = {**os.environ, "PMI_RANK": str(rank)}
        arguments = ["sh", "-c", command] if rank else [sys.executable, "-c", code]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        return done.stdout

    names = on_ranks(name)
    assert names[0] and names[0] == names[1]


def test_several_nodes_without_an_address_are_told_to_give_one():
    with pytest.raises(ConfigurationError, match="2 nodes .*MASTER_ADDR .*mpirun -x"):
        store_for(cluster(1, launcher="openmpi", address=None, nodes=2), SECONDS)


class KeyValueServer(http.server.BaseHTTPRequestHandler):
    """What horovodrun's rendezvous server does with PUT and GET."""

    def do_PUT(self):
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200)

    def do_GET(self):
        value = self.server.values.get(self.path)
        self.answer(404 if value is None else 200, value or b"")

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def horovod():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), KeyValueServer)
    server.values = {}
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_under_horovodrun_ranks_meet_by_its_server(horovod, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    environment = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(horovod.server_port),
    }

    def meet(rank):
        return store_for(cluster(rank, launcher="horovodrun", address=None), SECONDS, environment)

    assert talk(on_ranks(meet))
    assert talk(on_ranks(meet))
    assert horovod.values["/fitkit/store"].startswith(b"127.0.0.1:")


def test_under_horovodrun_an_absent_server_is_named():
    absent = cluster(0, launcher="horovodrun", address=None)
    with pytest.raises(ConfigurationError, match="HOROVOD_GLOO_RENDEZVOUS_ADDR is not set"):
        shared_address(absent, {"HOROVOD_RANK": "0"})
    environment = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port()),
    }
    with pytest.raises(ConfigurationError, match="/fitkit/store .*refused.*MASTER_ADDR"):
        store_for(absent, SECONDS, environment)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp6"), reason="reads /proc")
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_on_one_node_rank_0_listens_at_this_machine_s_own_address_alone(address):
    port = free_port() if address else None

    def meet(rank):
        return store_for(cluster(rank, launcher="openmpi", address=address, port=port), SECONDS)

    found = on_ranks(meet)
    port = found[0].underlying_store.port
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            fields = [line.split() for line in lines]
        listening |= {f[1] for f in fields if f[3] == "0A" and f[1].endswith(f":{port:04X}")}
    assert listening == {f"0100007F:{port:04X}"}
