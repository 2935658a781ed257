"""Process groups on real devices: what NCCL alone can show. Where GPUs are simulated, gloo is it.

The first tests need one GPU: a group of one rank starts NCCL, too.
"""

import copy
import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fitkit
from fitkit.callbacks import Callback
from fitkit.distributed.world import World
from fitkit.extras.launchers import group
from fitkit.extras.launchers.workers import end_workers
from tests.nets import classification

X, Y = classification(64, 6)
GPU = torch.device("cuda", 0)
START_S = 60
"""What a group may take to start on a busy machine; NCCL's start is a second or less."""


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_the_tests():
    yield
    end_workers()


def entered():
    """The collectives of a group of one rank, which has used NCCL."""
    collectives, is_made = group.enter(World(), GPU, dist.HashStore(), None, None)
    assert is_made
    total = torch.ones(3, device=GPU)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3
    return collectives


@pytest.fixture
def left():
    yield
    group.leave()
    assert not dist.is_initialized()
    assert group.NCCL_FAILURES not in os.environ


def test_a_group_serves_main_memory_and_the_device_without_a_warning(left):
    """A warning would say that NCCL guesses its device, or ask for `device_id`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collectives = entered()
        dist.barrier()
        tensors = [torch.ones(3, device=GPU), torch.ones(2)]
        collectives.broadcast_tensors(tensors)
        assert collectives.gather({"tensors": tensors[1]})[0]["tensors"].tolist() == [1.0] * 2
        assert collectives.sums([1.0, 2.0]) == [1.0, 2.0]
        assert len(collectives.join_rows(tensors[0][None])) == 1


def test_a_group_starts_within_seconds_each_time(left, record_property):
    """Each call has its own: its start is what calls on several ranks pay."""
    for start in ("first", "second", "third"):
        began = time.monotonic()
        entered()
        torch.cuda.synchronize(GPU)
        seconds = time.monotonic() - began
        record_property(f"{start} start in seconds", seconds)
        assert seconds < START_S
        group.leave()


def test_a_group_that_was_aborted_makes_way_for_the_next(left):
    """NCCL's watchdog would end the process by default: the user's own."""
    for _ in range(2):
        entered()
        group.abort()
        group.leave()
    entered()


def on_two(**options):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.manual_seed(0)
    model = fitkit.Model(nn.Linear(6, 3))
    hardware = {"accelerator": "gpu", "devices": 2, "strategy": "ddp_spawn"}
    model.compile("sgd", "cross_entropy", learning_rate=0.1, **hardware, **options)
    return model


def test_each_verb_on_two_gpus_starts_nccl_within_seconds(record_property):
    model = on_two()
    model.fit(X, Y, batch_size=8, verbose=0)  # starts the worker
    for verb in (model.fit, model.evaluate, model.predict):
        began = time.monotonic()
        verb(X, **({} if verb == model.predict else {"y": Y}), batch_size=8, verbose=0)
        record_property(f"{verb.__name__} in seconds", time.monotonic() - began)
        assert time.monotonic() - began < START_S


class Killed(Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.global_rank == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_ends_the_call_and_not_the_users_process():
    model = on_two()
    with pytest.raises(fitkit.WorkerError, match="SIGKILL"):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Killed()])
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.global_step >= 8


class CopyOnEachRank(Callback):
    """Evaluates a copy of the model within fit, in the group that is there."""

    def on_epoch_end(self, epoch, logs=None):
        made = copy.copy(self.model)
        assert made.evaluate(X, Y, verbose=0) == self.model.evaluate(X, Y, verbose=0)


def test_a_copy_is_evaluated_within_fit_by_the_same_nccl():
    model = on_two()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[CopyOnEachRank()])
