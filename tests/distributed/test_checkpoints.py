"""Backups of several ranks: cut by kill -9, a signal or torchrun, and gone on with exactly."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import fitkit
from fitkit.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from fitkit.errors import CheckpointError
from tests.limits import patience

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
    import os, sys, time
    import torch, fitkit
    from torch.utils.data import DataLoader, Dataset
    open(f"pid{os.getpid()}", "w").close()

    class Rows(Dataset):
        def __len__(self):
            return 40
        def __getitem__(self, index):
            return torch.full((3,), index / 40), torch.full((1,), index / 40)

    class Slow(fitkit.callbacks.Callback):
        stops_alike = True
        def __init__(self, pause_s, killed=None):
            self.pause_s, self.killed = float(pause_s), killed
        def on_train_batch_end(self, batch, logs):
            if self.model.is_global_zero:
                open("step", "a").write("x")
            time.sleep(self.pause_s)
            if self.model.global_rank == 1 and self.model.global_step == 7:
                if self.killed and not os.path.exists(self.killed):
                    open(self.killed, "w").close()
                    os.kill(os.getpid(), 9)

    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
    model = fitkit.Model(torch.nn.Sequential(*layers))
    model.compile("adam", "mse", accelerator="cpu")
    if sys.argv[1] != "torchrun":
        model.compile(strategy=sys.argv[1], devices=2)
    loader = DataLoader(Rows(), 4, shuffle=True, num_workers=1)
    backup = fitkit.callbacks.BackupAndRestore("backup", save_freq=1)
    model.fit(loader, epochs=2, verbose=0, callbacks=[Slow(*sys.argv[2:]), backup])  # 2 x 5 steps
    if model.is_global_zero:
        model.save_weights("end.h5")
"""
STEPS = 10


def start(folder, *arguments, launcher=()):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, "train.py", *arguments], cwd=folder, start_new_session=True,
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process, folder, seconds=100):
    """Its status and what it said; none of the script's processes is left."""
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + patience(30)
    while left := [path.name for path in folder.glob("pid*") if lives(int(path.name[3:]))]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    for path in folder.glob("pid*"):
        path.unlink()
    return process.returncode, said


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_made(folder):
    return len((folder / "step").read_text()) if (folder / "step").exists() else 0


def wait_for_step(folder, number, process):
    deadline = time.monotonic() + patience(90)
    while steps_made(folder) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def weights(path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    fitkit.Model(net).load_weights(path)
    return net.state_dict()


def assert_same(found, wanted):
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """The weights of a run that nobody cut; ranks make the same numbers however they start."""
    folder = tmp_path_factory.mktemp("uncut")
    status, said = ended(start(folder, "ddp", "0"), folder)
    assert status == 0, said
    return weights(folder / "end.h5")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp"])
def test_the_same_command_goes_on_bit_for_bit(tmp_path, strategy, number, request):
    process = start(tmp_path, strategy, "0.15")
    wait_for_step(tmp_path, 7, process)
    os.kill(process.pid, number)
    status, said = ended(process, tmp_path)
    assert status == (-9 if number == signal.SIGKILL else 143), said
    made = steps_made(tmp_path)
    assert 7 <= made < STEPS
    status, said = ended(start(tmp_path, strategy, "0"), tmp_path)
    assert status == 0, said
    # After kill -9 the step that wasn't saved is made again.
    assert STEPS <= steps_made(tmp_path) <= STEPS + (number == signal.SIGKILL)
    assert not (tmp_path / "backup").exists()
    if strategy == "ddp":
        assert_same(weights(tmp_path / "end.h5"), request.getfixturevalue("uncut"))
        return
    whole = tmp_path / "whole"
    status, said = ended(start(whole, strategy, "0"), whole)
    assert status == 0, said
    assert_same(weights(tmp_path / "end.h5"), weights(whole / "end.h5"))


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_backup(tmp_path, uncut):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                "--max-restarts=2", "--monitor-interval=0.2")  # fmt: skip
    process = start(tmp_path, "torchrun", "0", "killed", launcher=launcher)
    status, said = ended(process, tmp_path, 200)
    assert status == 0, said
    assert (tmp_path / "killed").exists()
    assert STEPS <= steps_made(tmp_path) <= STEPS + 1
    assert_same(weights(tmp_path / "end.h5"), uncut)


def node(folder, port, *, serves):
    """One of one or two nodes, with one rank each; `serves`: whether it holds the store."""
    conf = (f"is_host={int(serves)}", "last_call_timeout=6", "keep_alive_interval=1",
            "keep_alive_max_attempt=2")  # fmt: skip
    launcher = (
        "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=job",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--max-restarts=3", "--monitor-interval=0.2", f"--rdzv-conf={','.join(conf)}",
    )  # fmt: skip
    return start(folder, "torchrun", "0.3", launcher=launcher)


@pytest.mark.slow
def test_when_a_node_is_lost_the_others_go_on_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = node(tmp_path, port, serves=True)
    second = node(tmp_path, port, serves=False)
    wait_for_step(tmp_path, 6, first)
    for group in (second.pid, *children(second.pid)):  # a node goes with all that runs on it
        os.killpg(group, signal.SIGKILL)
    second.communicate()
    at_death = steps_made(tmp_path)
    status, said = ended(first, tmp_path, 120)
    assert status == 0, said
    assert "continues with 1 ranks instead of 2" in said
    # Of the second epoch's five steps of two ranks, one rank makes two for each that was lost.
    assert at_death < steps_made(tmp_path) <= at_death + 10
    assert (tmp_path / "end.h5").exists()


def children(pid):
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [line.split() for line in rows.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


# ---------------------------------------------------------------------- in this process

X = torch.arange(40.0)[:, None] / 40
Y = X.clone()


class Notes(torch.nn.Module):
    """Notes which samples it has learnt from, a file a rank."""

    def __init__(self, folder):
        super().__init__()
        self.layer, self.folder = torch.nn.Linear(1, 1), str(folder)

    def forward(self, x):
        if self.training:
            with open(f"{self.folder}/{os.getpid()}.ids", "a") as file:
                file.write("".join(f"{round(value * 40)}\n" for value in x[:, 0].tolist()))
        return self.layer(x)


def compiled(folder, devices):
    torch.manual_seed(0)
    model = fitkit.Model(Notes(folder))
    strategy = "ddp_spawn" if devices > 1 else "auto"
    model.compile("sgd", "mse", accelerator="cpu", devices=devices, strategy=strategy)
    return model


class Crash(Callback):
    """Every rank fails at the beginning of a step of the second epoch, by default its third."""

    stops_alike = True

    def __init__(self, at=2):
        self.at = at

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, self.at):
            raise RuntimeError("mine")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_takes_the_rest_of_the_epoch_each_sample_once(
    tmp_path, before, after
):
    backup = BackupAndRestore(tmp_path / "b", save_freq=1)
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    with pytest.raises((RuntimeError, fitkit.WorkerError), match="mine"):
        compiled(tmp_path, before).fit(X, Y, callbacks=[backup, Crash()], **options)
    with pytest.warns(UserWarning, match=f"{after} ranks instead of {before}"):
        compiled(tmp_path, after).fit(X, Y, callbacks=backup, **options)
    files = tmp_path.glob("*.ids")
    seen = sorted(int(line) for path in files for line in path.read_text().split())
    assert seen == sorted([*range(40), *range(40)])


@pytest.mark.filterwarnings("ignore:Training continues with")
def test_so_does_a_third_after_a_number_that_does_not_divide_the_batches(tmp_path):
    backup = BackupAndRestore(tmp_path / "b", save_freq=1)
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    # Three batches, which two ranks count as two steps, and four more.
    for ranks, crash in ((1, Crash(3)), (2, Crash(4))):
        with pytest.raises((RuntimeError, fitkit.WorkerError), match="mine"):
            compiled(tmp_path, ranks).fit(X, Y, callbacks=[backup, crash], **options)
    compiled(tmp_path, 1).fit(X, Y, callbacks=backup, **options)
    files = tmp_path.glob("*.ids")
    seen = sorted(int(line) for path in files for line in path.read_text().split())
    assert seen == sorted([*range(40), *range(40)])


def test_two_ranks_choose_alike_write_once_and_share_an_error(tmp_path):
    class SameEverywhere(Callback):
        stops_alike = True

        def on_train_end(self, logs=None):
            run = self.model._fitkit.fit_state.run
            callbacks = run.arguments.callback_list.callbacks
            own = next(c for c in callbacks if isinstance(c, ModelCheckpoint))
            facts = own.best, own.best_model_path, own._kept, own.last_model_path
            told = run.collectives.gather(facts)
            assert told[0] == told[1]

    for number, options in enumerate([
        {"save_top_k": 2}, {"save_freq": 3, "save_last": True}, {"train_time_interval": 1e-9},
        {"asynchronous": True, "save_best_only": True},
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        saves = ModelCheckpoint(folder / "{epoch}-{step}.h5", "loss", **options)
        callbacks = [saves, SameEverywhere()]
        compiled(tmp_path, 2).fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        names = sorted(os.listdir(folder))
        if number == 0:  # the loss falls, so the last two are the best
            assert names == ["2-10.h5", "3-15.h5"]
        elif number == 1:
            steps = [(1, 3), (2, 6), (2, 9), (3, 12), (3, 15)]
            assert names == sorted([*(f"{e}-{s}.h5" for e, s in steps), "last.h5"])
        elif number == 2:
            assert len(names) > 3
        else:
            assert names == ["1-5.h5", "2-10.h5", "3-15.h5"]
        resumed = compiled(tmp_path, 1)
        resumed.load(saves.last_path())
        # By time the last one may be of an earlier step.
        assert resumed.global_step == 15 or (number == 2 and resumed.global_step > 5)
    (tmp_path / "file").write_text("no folder")
    saves = ModelCheckpoint(tmp_path / "file" / "x.h5")
    with pytest.raises(CheckpointError, match="file can't be made"):
        compiled(tmp_path, 2).fit(X, Y, batch_size=4, verbose=0, callbacks=saves)
