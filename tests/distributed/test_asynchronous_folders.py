"""Folders that threads write, a part on each rank: their content, failing ranks, dying ones."""

import os
import signal
import time

import pytest
import torch

import fitkit
from fitkit.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from fitkit.errors import CheckpointError
from fitkit.extras.dcp import folder_by_threads
from fitkit.strategies import FSDPStrategy
from tests.nets import dense, regression

X, Y = regression(48, 6)


def trained(strategy, *callbacks, epochs=3, **options):
    model = fitkit.Model(dense(6, 7, 1))
    model.compile(
        "adam", "mse", learning_rate=0.01, strategy=strategy, accelerator="cpu", devices=2
    )
    model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)
    return model


def equal(one, other):
    return all(map(torch.equal, one.net.state_dict().values(), other.net.state_dict().values()))


@pytest.mark.parametrize("strategy", ["ddp_spawn", FSDPStrategy(wrap=None)], ids=["ddp", "fsdp"])
def test_they_have_the_bytes_of_those_at_once(tmp_path, strategy):
    for name, asynchronous in (("once", False), ("thread", True)):
        saves = ModelCheckpoint(
            tmp_path / name / "{epoch}.dcp", save_weights_only=True, asynchronous=asynchronous
        )
        trained(strategy, saves)
    folders = ["1.dcp", "2.dcp", "3.dcp"]
    assert sorted(os.listdir(tmp_path / "thread")) == folders
    for folder in folders:
        one, other = tmp_path / "once" / folder, tmp_path / "thread" / folder
        assert sorted(os.listdir(one)) == sorted(os.listdir(other))
        for file in os.listdir(one):
            assert (one / file).read_bytes() == (other / file).read_bytes()


class Cut(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp_spawn", marks=pytest.mark.slow, id="ddp"),
        pytest.param(FSDPStrategy(wrap=None), id="fsdp"),
    ],
)
def test_a_training_goes_on_from_one(tmp_path, strategy):
    def backup():
        return BackupAndRestore(tmp_path / "b", sharded=True, asynchronous=True, save_freq=4)

    uncut = trained(strategy)
    with pytest.raises(ZeroDivisionError):
        trained(strategy, backup(), Cut())
    assert [name for name in os.listdir(tmp_path / "b") if "unfinished" in name] == []
    again = trained(strategy, backup())
    assert equal(again, uncut)
    saves = ModelCheckpoint(tmp_path / "{epoch}.dcp", asynchronous=True, save_last=True)
    trained(strategy, saves)
    last = trained(strategy, epochs=3, resume_from=tmp_path / "2.dcp")
    assert equal(last, uncut)
    assert sorted(os.listdir(tmp_path)) == ["1.dcp", "2.dcp", "3.dcp", "last.dcp"]


class Failing(Callback):
    """Lets a rank's part fail: by an error, by the process's end, or slowly."""

    def __init__(self, rank, kind):
        self.rank, self.kind = rank, kind

    def on_train_begin(self, logs=None):
        if self.model.global_rank == self.rank:
            self.real = folder_by_threads.write_shard
            folder_by_threads.write_shard = self.write_shard

    def write_shard(self, *arguments):
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "fails":
            raise CheckpointError(f"rank {self.rank}'s disk is full")
        time.sleep(0.3)
        return self.real(*arguments)

    def on_train_end(self, logs=None):
        self.put_back()

    def on_exception(self, error):
        self.put_back()

    def put_back(self):
        if self.model.global_rank == self.rank:
            folder_by_threads.write_shard = self.real


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_fails_ends_the_fit_with_its_error(tmp_path, rank):
    saves = ModelCheckpoint(tmp_path / "{epoch}.dcp", asynchronous=True)
    with pytest.raises(CheckpointError, match=f"rank {rank}'s disk is full"):
        trained(FSDPStrategy(wrap=None), saves, Failing(rank, "fails"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_slow_rank_is_waited_for(tmp_path, rank):
    saves = ModelCheckpoint(tmp_path / "{epoch}.dcp", asynchronous=True)
    trained(FSDPStrategy(wrap=None), saves, Failing(rank, "slow"), epochs=2)
    assert sorted(os.listdir(tmp_path)) == ["1.dcp", "2.dcp"]


def test_a_rank_that_dies_leaves_no_thread_that_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("fitkit.extras.dcp.folder_by_threads.GRACE_S", 0.5)
    saves = ModelCheckpoint(tmp_path / "{epoch}.dcp", asynchronous=True)
    with pytest.raises(Exception, match="rank 1|killed|SIGKILL"):
        trained(FSDPStrategy(wrap=None), saves, Failing(1, "killed"))
    assert os.listdir(tmp_path) == []
