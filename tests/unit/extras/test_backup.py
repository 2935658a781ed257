"""BackupAndRestore in one process: what goes on after a cut, and how a signal cuts."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import fitkit
from fitkit.callbacks import (
    BackupAndRestore,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    checkpoint_writer,
)
from fitkit.checkpoint.atomic import replacing
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError, Preempted
from fitkit.extras.backup import SignalNotes
from fitkit.extras.dcp.unfinished_folder import UnfinishedFolder
from tests.limits import patience
from tests.nets import regression
from tests.reference import assert_same_weights

X, Y = regression(48, 3)


def compiled(**arguments):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    model = fitkit.Model(net)
    model.compile("adam", "mse", **arguments)
    return model


class At(Callback):
    """Does something at the beginning of a batch (its number among all of this fit)."""

    def __init__(self, batch, act):
        self.moment, self.act, self.seen = batch, act, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.moment:
            self.act()


def crash():
    raise RuntimeError("mine")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def fit(model, *callbacks, epochs=4):
    """Six batches an epoch."""
    torch.manual_seed(5)
    return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, validation_data=(X, Y),
                     callbacks=list(callbacks))  # fmt: skip


@pytest.mark.parametrize("saves_asynchronously", [False, True], ids=["at once", "by a thread"])
@pytest.mark.parametrize("save_freq", ["epoch", 1, 4])
def test_the_same_command_goes_on_and_cleans_up(tmp_path, save_freq, saves_asynchronously):
    whole = compiled()
    expected = fit(whole).history
    # Cut in the second epoch, and again soon after it was resumed.
    for moment, left in ((10, {"epoch": 6, 1: 9, 4: 8}), (3, {"epoch": 6, 1: 11, 4: 8})):
        backup = BackupAndRestore(
            tmp_path / "b", save_freq=save_freq, asynchronous=saves_asynchronously)  # fmt: skip
        with pytest.raises(RuntimeError, match="mine"):
            fit(compiled(), backup, At(moment, crash))
        assert len(os.listdir(tmp_path / "b")) == 1
        found = compiled()
        found.load(backup.last_path())
        assert found.global_step == left[save_freq]
    model = compiled()
    history = fit(model, BackupAndRestore(tmp_path / "b", save_freq=save_freq)).history
    assert_same_weights(model, whole)
    assert history == {name: pytest.approx(values) for name, values in expected.items()}
    assert not os.listdir(tmp_path)


def test_what_other_callbacks_counted_is_in_the_backup_whatever_their_order(tmp_path):
    """The epoch's end counts in EarlyStopping, though it stands after the backup in the list."""

    def callbacks(moment):
        return [BackupAndRestore(tmp_path, delete_checkpoint=False),
                EarlyStopping("loss", min_delta=100.0, patience=3), At(moment, crash)]  # fmt: skip

    with pytest.raises(RuntimeError):
        fit(compiled(), *callbacks(13), epochs=9)
    history = fit(compiled(), *callbacks(99), epochs=9)
    assert history.epoch == [0, 1, 2, 3]
    history = fit(compiled(), *callbacks(99), epochs=9)  # stopped already, and stops there again
    assert history.epoch == [0, 1, 2, 3]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_backup_is_told_and_the_one_before_serves(tmp_path, keep):
    backup = BackupAndRestore(tmp_path, keep=keep)
    with pytest.raises(RuntimeError, match="mine"):
        fit(compiled(), backup, At(20, crash))
    names = ["backup-000002.h5", "backup-000003.h5"][-keep:]
    assert sorted(os.listdir(tmp_path)) == names
    with open(tmp_path / "backup-000003.h5", "r+b") as file:
        file.truncate(3000)
    if keep == 1:
        with pytest.raises(CheckpointError, match="000003.h5 is damaged"):
            fit(compiled(), backup)
        return
    whole, model = compiled(), compiled()
    fit(whole)
    with pytest.warns(UserWarning, match=r"000003.h5 is damaged.* continues from .*000002.h5"):
        fit(model, backup)
    assert_same_weights(model, whole)


def test_a_thread_never_writes_a_number_twice(tmp_path, monkeypatch):
    written, save = [], checkpoint_writer.save_checkpoint

    def slow(path, *contents):
        written.append(os.path.basename(path))
        time.sleep(0.02)  # longer than a step takes
        save(path, *contents)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", slow)
    fit(compiled(), BackupAndRestore(tmp_path / "b", save_freq=1, asynchronous=True), epochs=1)
    assert written == [f"backup-{number:06d}.h5" for number in range(1, len(written) + 1)]
    assert len(written) > 1


def test_what_killed_runs_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    folder = tmp_path / "b"
    folder.mkdir()
    for name in (".backup-000044.h5", ".other.h5"):
        (folder / f"{name}.0123456789ab.fitkit-unfinished").touch()
    aside = folder / ".backup-000002.dcp.0123456789ab.fitkit-unfinished"
    aside.mkdir()
    (aside / "index.h5").touch()
    seen = []
    look = At(1, lambda: seen.extend(os.listdir(folder)))
    living = UnfinishedFolder(folder / "living.dcp")
    with replacing(folder / "living.h5") as file:
        fit(compiled(), BackupAndRestore(folder), look)
        file.write(b"whole")
    assert len(seen) == 2  # the two that are being written
    living.finish()
    assert sorted(os.listdir(folder)) == ["living.dcp", "living.h5"]
    fit(compiled(), BackupAndRestore(tmp_path / "alone"))
    assert sorted(os.listdir(tmp_path)) == ["b"]


def test_a_backup_is_saved_after_the_files_of_the_epoch_whatever_the_order(tmp_path, monkeypatch):
    written, save = [], checkpoint_writer.save_checkpoint

    def noted(path, *contents):
        written.append(os.path.basename(path))
        save(path, *contents)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", noted)
    fit(compiled(), BackupAndRestore(tmp_path / "b"), ModelCheckpoint(tmp_path / "{epoch}.h5"),
        epochs=2)  # fmt: skip
    assert written == ["1.h5", "backup-000001.h5", "2.h5", "backup-000002.h5"]


def test_a_finished_training_isnt_made_again(tmp_path):
    fit(compiled(), BackupAndRestore(tmp_path, delete_checkpoint=False, double_checkpoint=True))
    assert sorted(os.listdir(tmp_path)) == ["backup-000003.h5", "backup-000004.h5"]
    (tmp_path / "notes.txt").write_text("mine")
    model = compiled()
    history = fit(model, BackupAndRestore(tmp_path))
    assert history.epoch == [0, 1, 2, 3] and model.global_step == 24
    assert os.listdir(tmp_path) == ["notes.txt"]


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize("save_freq", ["epoch", False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sigterm_ends_the_step_saves_and_exits_with_143(tmp_path, save_freq, accumulate, capfd):
    whole = compiled(accumulate_grad_batches=accumulate)
    fit(whole)
    before = signal.getsignal(signal.SIGTERM)
    first = compiled(accumulate_grad_batches=accumulate)
    with pytest.raises(SystemExit) as caught:
        fit(first, BackupAndRestore(tmp_path, save_freq), At(9, terminate))
    assert caught.value.code == 143
    assert first.global_step == (9 if accumulate == 1 else 5)  # 3 updates an epoch; the 9th batch
    assert signal.getsignal(signal.SIGTERM) is before  # begins a group, which is completed
    assert "status 143" in capfd.readouterr().err
    model = compiled(accumulate_grad_batches=accumulate)
    fit(model, BackupAndRestore(tmp_path, save_freq))
    assert_same_weights(model, whole)


def test_a_handler_of_the_users_is_called_when_the_file_is_there(tmp_path):
    seen = []

    def mine(number, frame):
        seen.append((number, os.listdir(tmp_path)))

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(Preempted):
            fit(compiled(), BackupAndRestore(tmp_path), At(2, terminate))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [(signal.SIGTERM, ["backup-000001.h5"])]


def test_a_signal_in_the_validation_waits_for_its_end(tmp_path):
    class Terminates(Callback):
        def on_test_batch_begin(self, batch, logs=None):
            if batch == 0:
                terminate()

    model = compiled()
    with pytest.raises(SystemExit):
        fit(model, BackupAndRestore(tmp_path, save_freq=100), Terminates())
    assert model.global_step == 6
    twin = compiled()
    history = fit(twin, BackupAndRestore(tmp_path))
    assert twin.global_step == 24 and history.epoch == [0, 1, 2, 3]


def test_handlers_come_back_after_success_and_failure_and_in_threads_none_is_set(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def look(epoch, logs):
        seen.append(signal.getsignal(signal.SIGTERM) is before)

    looks = fitkit.callbacks.LambdaCallback(on_epoch_end=look)
    fit(compiled(), BackupAndRestore(tmp_path), looks, epochs=1)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(RuntimeError):
        fit(compiled(), BackupAndRestore(tmp_path), looks, At(8, crash))
    assert signal.getsignal(signal.SIGTERM) is before
    fit(compiled(), BackupAndRestore(tmp_path / "c", catch_signals=False), looks, epochs=1)
    backup = BackupAndRestore(tmp_path / "b")
    thread = threading.Thread(target=lambda: fit(compiled(), backup, looks, epochs=1))
    thread.start()
    thread.join()
    assert seen == [False, False, True, True]


def test_a_slurm_job_is_put_into_the_queue_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\ncd {tmp_path}\necho $@ > said; ls b >> said\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit) as caught:
        fit(compiled(), BackupAndRestore(tmp_path / "b"),
            At(2, lambda: os.kill(os.getpid(), signal.SIGUSR1)))  # fmt: skip
    assert caught.value.code == 138
    assert (tmp_path / "said").read_text().split("\n") == ["requeue 77", "backup-000001.h5", ""]
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    notes = SignalNotes()
    notes.begin()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    notes.restore()


SCRIPT = """
    import os, sys, time, torch, fitkit
    from torch.utils.data import DataLoader, Dataset
    class Rows(Dataset):
        def __len__(self):
            return 40
        def __getitem__(self, index):
            return torch.full((3,), index / 40), torch.full((1,), index / 40)
    class Slow(fitkit.callbacks.Callback):
        stops_alike = True
        def on_train_batch_end(self, batch, logs):
            open("step", "a").write("x")
            time.sleep(float(sys.argv[1]))
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
    model = fitkit.Model(torch.nn.Sequential(*layers))
    model.compile("adam", "mse")
    loader = DataLoader(Rows(), 4, shuffle=True, num_workers=2)
    backup = fitkit.callbacks.BackupAndRestore("backup", save_freq=1)
    model.fit(loader, epochs=2, verbose=0, callbacks=[Slow(), backup])
    model.save_weights(sys.argv[2])
"""


def run(folder, *arguments):
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments], cwd=folder, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def ended(process):
    try:
        return process.wait(timeout=patience(40))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def steps_made(folder):
    return len((folder / "step").read_text()) if (folder / "step").exists() else 0


@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGKILL, id="kill -9", marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_script_with_loader_workers_goes_on_after(tmp_path, number, monkeypatch):
    """The signal goes to the whole group, as a scheduler sends it: the loader's workers too."""
    process = run(tmp_path, "0.2", "cut.h5")
    deadline = time.monotonic() + patience(60)
    while steps_made(tmp_path) < 13 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    status = ended(process)
    assert status == (-9 if number == signal.SIGKILL else 143)
    made = steps_made(tmp_path)
    assert 13 <= made < 20
    assert ended(run(tmp_path, "0", "cut.h5")) == 0
    assert 20 <= steps_made(tmp_path) <= 21  # after kill -9 the last step may be made again
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    monkeypatch.setattr(sys, "argv", ["train.py", "0", "whole.h5"])
    found = {}
    exec(textwrap.dedent(SCRIPT), found)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    fitkit.Model(net).load_weights(tmp_path / "cut.h5")
    assert_same_weights(net, found["model"].net)
    assert not (tmp_path / "backup").exists()


MISTAKES = {
    "no folder": ((3,), {}, ArgumentTypeError, "must be a path"),
    "frequency": (("b", "epochs"), {}, ConfigurationError, "'epoch'"),
    "true": (("b", True), {}, ArgumentTypeError, "save_freq"),
    "keep": (("b",), {"keep": 0}, ConfigurationError, "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_at_once(mistake):
    arguments, options, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        BackupAndRestore(*arguments, **options)
