"""Faults in ranks of ddp_spawn: each ends the call in seconds, says why, and leaves nothing.

Exceptions and ends of a rank by a callback are in test_workers.py, those of scripts in
test_script_faults.py.
"""

import operator
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.extras.launchers.workers import end_workers
from tests.limits import patience
from tests.nets import classification

pytestmark = pytest.mark.timeout(120)

X, Y = classification(103, 6, seed=1)


def compiled(net=None, timeout=None, **arguments):
    torch.manual_seed(0)
    model = fitkit.Model(net or torch.nn.Linear(6, 3))
    strategy = fitkit.strategies.DDPSpawnStrategy(timeout=timeout)
    settings = {"optimizer": "sgd", "loss": "cross_entropy", "accelerator": "cpu", "devices": 2}
    model.compile(**{**settings, "strategy": strategy, **arguments})
    return model


def on_rank_1(act):
    if dist.is_initialized() and dist.get_rank() == 1:
        act()


def raise_mine():
    raise KeyError("mine")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Acts(torch.nn.Module):
    """Does something on rank 1 in its second forward of training or of evaluation."""

    def __init__(self, act, training=True):
        super().__init__()
        self.layer, self.act, self.acts_in, self.calls = torch.nn.Linear(6, 3), act, training, 0

    def forward(self, x):
        self.calls += self.training == self.acts_in
        if self.calls == 2 and self.training == self.acts_in:
            on_rank_1(self.act)
        return self.layer(x)


class Rows(Dataset):
    """Does something at sample 60 and later, in whichever process reads it."""

    def __init__(self, act=lambda: None):
        self.act = act

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index >= 60:
            self.act()
        return X[index], Y[index]


def loader(act, **arguments):
    return DataLoader(Rows(act), batch_size=8, **arguments)


def train(net=None, data=None, timeout=None, **arguments):
    data = (X, Y) if data is None else (data,)
    arguments.setdefault("batch_size", 8)
    return compiled(net, timeout).fit(*data, verbose=0, epochs=2, **arguments)


# ---------------------------------------------------------------------- what may be left


OF_OTHER_TESTS: set[int] = set()
"""Processes that tests of other modules have left, such as Python's tracker of resources."""


def children():
    """The living processes that this one has started here, and theirs."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True)
    below = {}
    for row in rows.stdout.splitlines():
        pid, parent, state, words = row.split(maxsplit=3)
        if "Z" not in state and not words.startswith("ps -eo"):
            below.setdefault(int(parent), []).append(int(pid))
    found, waiting = [], [os.getpid()]
    while waiting:
        new = [pid for pid in below.get(waiting.pop(), []) if pid not in OF_OTHER_TESTS]
        found += new
        waiting += new
    return found


def open_ports():
    """The ports at which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def shared_memory():
    """The pieces of shared memory but those of strangers: processes that live, and aren't ours."""
    pieces = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    ours = {os.getpid(), *children()}
    return {
        name
        for name, made_by in pieces.items()
        if not made_by or int(made_by[1]) in ours or not os.path.exists(f"/proc/{made_by[1]}")
    }


def own_threads():
    # A group that was left may wait for a broken exchange up to its limit. What watches calls of
    # this process alone ends some seconds after the last one.
    names = [thread.name for thread in threading.enumerate()]
    others = ("fitkit-left-group", "fitkit-silence")
    return [name for name in names if "fitkit" in name and name not in others]


@pytest.fixture
def ports_before():
    """Those that tests of other modules have left open."""
    return open_ports()


@pytest.fixture(autouse=True)
def nothing_left_behind(ports_before):
    memory_before = shared_memory()
    yield
    end_workers()
    deadline = time.monotonic() + patience(10)
    while children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (children(), own_threads()) == ([], [])
    assert set(open_ports()) <= set(ports_before)
    assert shared_memory() <= memory_before


@pytest.fixture(scope="module", autouse=True)
def no_workers_of_other_tests():
    end_workers()
    OF_OTHER_TESTS.update(children())


# ---------------------------------------------------------------------- failures


def hang():
    time.sleep(600)


def hang_in_a_data_worker_of_a_killed_rank():
    if torch.utils.data.get_worker_info() is not None:
        hang()


def allocate_too_much():
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    torch.empty(2**34, dtype=torch.uint8)


FAULTS = {
    "data": (lambda: train(data=loader(lambda: on_rank_1(raise_mine))), "Rank 1.*KeyError: 'mine'"),
    "validation": (
        lambda: train(Acts(raise_mine, training=False), validation_data=(X, Y)),
        "Rank 1 failed: KeyError: 'mine'",
    ),
    "on_train_end": (
        lambda: train(callbacks=LambdaCallback(on_train_end=lambda logs: on_rank_1(raise_mine))),
        "Rank 1 failed: KeyError: 'mine'",
    ),
    "data worker killed": (
        lambda: train(data=loader(kill, num_workers=1)),
        # torch sees first that the worker has died, or that its connection has.
        r"Rank 1 failed: .*(DataLoader worker \(pid.* is killed by signal|ConnectionResetError)"
        "|DataLoader worker",
    ),
    "killed rank's data worker hangs": (
        lambda: train(Acts(kill), loader(hang_in_a_data_worker_of_a_killed_rank, num_workers=1)),
        "Rank 1 was ended by SIGKILL",
    ),
    "out of memory": (lambda: train(Acts(allocate_too_much)), "Rank 1 .*can't allocate memory"),
}


# test_workers.py has one in training, which ends alike.
EXCEPTIONS = ("data", "validation", "on_train_end")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.slow if f in EXCEPTIONS else ()) for f in FAULTS],
)
def test_a_fault_ends_the_call_and_leaves_nothing(fault, ports_before):
    begin, words = FAULTS[fault]
    began = time.monotonic()
    with pytest.raises((fitkit.WorkerError, RuntimeError), match=words) as caught:
        begin()
    assert time.monotonic() - began < patience(60)  # never a hang; not a measurement
    if isinstance(caught.value, fitkit.WorkerError):
        assert caught.value.rank == 1
        # While the user still holds the error, which may be for long in a notebook:
        assert (children(), own_threads()) == ([], [])
        assert set(open_ports()) <= set(ports_before)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_after_the_timeout():
    net = Acts(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    with pytest.raises(fitkit.WorkerError, match="Rank 1 doesn't answer"):
        train(net, timeout=6)


@pytest.mark.slow
def test_a_call_that_one_rank_alone_makes_is_named_after_the_timeout():
    model = compiled(timeout=6)

    def evaluate(epoch, logs):
        if model.is_global_zero:
            model.evaluate(X, Y, verbose=0)

    with pytest.raises(fitkit.WorkerError, match="different exchanges.*is_global_zero") as caught:
        model.fit(X, Y, verbose=0, epochs=2, callbacks=LambdaCallback(on_epoch_end=evaluate))
    assert "in evaluate" in str(caught.value) and "Rank 1 waited here" in str(caught.value)
    assert len(train().history["loss"]) == 2  # and the next call works


@pytest.mark.slow
def test_a_stream_without_batches_is_refused_on_several_ranks():
    with pytest.raises(fitkit.ConfigurationError, match="x is empty: it gave no batches"):
        compiled().fit((batch for batch in []), verbose=0)


def test_kill_9_of_the_script_ends_all_ranks_and_their_data_workers(tmp_path):
    script = """
        import os, time, torch, fitkit
        from torch.utils.data import DataLoader, TensorDataset
        model = fitkit.Model(torch.nn.Linear(6, 3))
        model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2)
        data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
        def tell(epoch, logs):
            if epoch == 1:
                print("begin", flush=True)
                time.sleep(600 * model.global_rank)
        model.fit(DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True), epochs=9,
                  verbose=0, callbacks=fitkit.callbacks.LambdaCallback(on_epoch_end=tell))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == b"begin\n"
        left = [pid for pid in children() if pid != process.pid]
        assert len(left) == 3  # a worker, and a data worker of each rank
        process.kill()
        process.wait()
    deadline = time.monotonic() + patience(30)
    while any(os.path.exists(f"/proc/{pid}") for pid in left):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ---------------------------------------------------------------------- no failures


@pytest.mark.slow
def test_many_calls_gather_nothing_even_in_other_threads_and_with_a_clock_that_jumps(monkeypatch):
    model = compiled()

    def calls(number):
        for _ in range(number):
            model.fit(X, Y, verbose=0)
            model.evaluate(X, Y, verbose=0)

    def open_files():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *children()]]

    def bytes_held():
        pages = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in children()]
        return sum(map(int, pages)) * resource.getpagesize()

    calls(2)
    before, bytes_before = open_files(), bytes_held()
    jumps, clock = iter(range(10**9)), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 86_400 * (-1) ** next(jumps))
    thread = threading.Thread(target=calls, args=(10,))
    thread.start()
    thread.join(90)
    assert not thread.is_alive()
    calls(10)
    now = open_files()
    assert len(now) == len(before) and all(map(operator.le, now, before))
    assert threading.active_count() <= 2
    assert bytes_held() - bytes_before < 20 * 2**20
