"""Hangs on one to three ranks: each rank's place is shown at the first look; healthy runs go on."""

import contextlib
import ctypes
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fitkit
from fitkit.callbacks import LambdaCallback
from tests.nets import classification

pytestmark = pytest.mark.timeout(120)

X, Y = classification(64, 6, seed=1)
LAST_S = 9
"""How long a planted hang lasts where nothing ends it."""


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def on_last(act):
    if rank() == size() - 1:
        act()


def sleep():
    time.sleep(LAST_S)


def lock():
    held = threading.Lock()
    held.acquire()
    with held:  # for ever
        pass


def keep_interpreter():
    ctypes.PyDLL(None).sleep(LAST_S)


def join_thread():
    thread = threading.Thread(target=time.sleep, args=(LAST_S,), daemon=True)
    thread.start()
    thread.join()


def run_program():
    subprocess.run([sys.executable, "-S", "-c", f"import time; time.sleep({LAST_S})"])


def wait_for_queue():
    with contextlib.suppress(queue.Empty):
        queue.Queue().get(timeout=LAST_S)


def wait_for_network():
    one, other = socket.socketpair()
    other.settimeout(LAST_S)
    with one, other, contextlib.suppress(TimeoutError):
        other.recv(1)


def compute():
    end = time.monotonic() + LAST_S
    while time.monotonic() < end:
        torch.ones(100) + 1


class Rows(Dataset):
    def __init__(self, act=None, s=0.0, on=None):
        self.act, self.s, self.on = act, s, on

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index == 60 and self.act is not None:
            on_last(self.act)
        if self.s and (self.on is None or rank() == self.on):
            time.sleep(self.s)
        return X[index], Y[index]


class Endless(IterableDataset):
    """Filters for ever on the last rank, after some samples."""

    shards_itself = True

    def __iter__(self):
        for index in range(1000):
            end = time.monotonic() + LAST_S
            while index == 20 and rank() == size() - 1 and time.monotonic() < end:
                time.sleep(0.01)  # filters for ever
            yield X[index % 64], Y[index % 64]


class Steps(fitkit.Model):
    """Calls an exchange in the third step, on some ranks only."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        if batch_idx == 2 and rank() == 0:
            self.all_gather(loss.detach())  # alone
        return loss


class Skipping(fitkit.Model):
    """Leaves out a batch on the last rank, in a step that makes its own updates."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and rank() == 1:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def test_a_rank_that_leaves_out_its_backward_pass_is_named_within_seconds():
    words = "Rank 1 made no backward pass where rank 0 did. Every rank must call manual_backward"
    with pytest.raises(fitkit.WorkerError, match=words) as found:
        fit(2, kind=Skipping, timeout=600)
    assert found.value.code == "FK043"


class Own(torch.nn.Module):
    """Does something in its third forward, or backward, on the last rank."""

    def __init__(self, act, backward=False):
        super().__init__()
        self.layer, self.act, self.backward, self.calls = torch.nn.Linear(6, 3), act, backward, 0

    def forward(self, x):
        self.calls += 1
        out = self.layer(x)
        if self.calls == 3 and self.backward:
            out.register_hook(lambda gradient: on_last(self.act))
        elif self.calls == 3:
            on_last(self.act)
        return out


def fit(ranks, *data, net=None, kind=fitkit.Model, timeout=60, epochs=1, jit=False, **options):
    model = kind(net or torch.nn.Linear(6, 3))
    strategy = fitkit.strategies.DDPSpawnStrategy(timeout=timeout) if ranks > 1 else "auto"
    hardware = {"accelerator": "cpu", "devices": ranks, "strategy": strategy}
    model.compile("sgd", "cross_entropy", jit_compile=jit, **hardware)
    make = options.pop("calls", None)
    calls = None if make is None else LambdaCallback(**make(model))
    data = data or (X, Y)
    return model.fit(*data, batch_size=8, epochs=epochs, verbose=0, callbacks=calls, **options)


def at_batch(act):
    return lambda model: {"on_train_batch_end": lambda batch, logs: batch == 2 and on_last(act)}


def alone_on_rank_zero(what):
    def calls(model):
        def end(batch, logs):
            if batch == 2 and model.is_global_zero:
                what(model)

        return {"on_train_batch_end": end}

    return calls


def evaluates(model):
    model.evaluate(X, Y, verbose=0)


def gathers(model):
    model.all_gather(torch.ones(1))


def predicts(model):
    model.predict(X, verbose=0)


def saves(model):
    model.save(os.path.join(tempfile.gettempdir(), f"silence_{os.getpid()}.h5"))


def barrier():
    dist.barrier()


def crossed(model):
    """Two exchanges, in another order on rank 0."""

    def end(batch, logs):
        if batch == 2 and rank() == 0:
            dist.broadcast(torch.ones(1), 1)  # first here
        if batch == 2:
            dist.barrier()  # first there

    return {"on_train_batch_end": end}


def loader(act, **options):
    return DataLoader(Rows(act), batch_size=8, num_workers=1, **options)


NONE = "none will go on"
HANGS = {
    "callback sleeps": (
        1,
        lambda n: fit(n, calls=at_batch(sleep)),
        r"test_silence\.py:\d+: time\.sleep\(LAST_S\)",
    ),
    "lock": (
        1,
        lambda n: fit(n, calls=at_batch(join_thread)),
        r"waits \(\S+\) in .*thread\.join\(\)",
    ),
    "a program": (1, lambda n: fit(n, calls=at_batch(run_program)), r"in .*subprocess\.run"),
    "data set": (
        1,
        lambda n: fit(n, DataLoader(Rows(sleep), batch_size=8)),
        r"time\.sleep\(LAST_S\)",
    ),
    "worker": (
        1,
        lambda n: fit(n, loader(sleep)),
        r"DataLoader worker 0 \(process \d+\), which is in sleep",
    ),
    "forward": (1, lambda n: fit(n, net=Own(sleep)), r"batch 2: is in sleep"),
    "stream": (
        1,
        lambda n: fit(n, DataLoader(Endless(), batch_size=8), steps_per_epoch=9),
        r"data set Endless\.__iter__",
    ),
    "evaluate": (
        1,
        lambda n: evaluate(DataLoader(Rows(sleep), batch_size=8)),
        r"\(evaluate\).*time\.sleep",
    ),
    "validation": (
        1,
        lambda n: fit(n, validation_data=DataLoader(Rows(sleep), batch_size=8)),
        r"fit, epoch 1, validation.*sleep",
    ),
    "callback sleeps on 2": (
        2,
        lambda n: fit(n, calls=at_batch(sleep)),
        r"rank 0, batch 2: waits for the other.*rank 1, batch 2: is in .*time\.sleep",
    ),
    "callback sleeps on 3": (
        3,
        lambda n: fit(n, calls=at_batch(sleep)),
        r"rank 1, batch 2: waits for the other.*rank 2, batch 2: is in .*time\.sleep",
    ),
    "lock on 2": (
        2,
        lambda n: fit(n, calls=at_batch(lock), timeout=12),
        r"rank 1, batch 2: is in lock, .*with held:",
    ),
    "worker on 2": (
        2,
        lambda n: fit(n, loader(sleep)),
        r"rank 1, .*DataLoader worker 0 \(process \d+\), which is in sleep",
    ),
    "stream on 2": (
        2,
        lambda n: fit(n, DataLoader(Endless(), batch_size=8), steps_per_epoch=9),
        r"rank 1, .*data set Endless\.__iter__.*filters for ever",
    ),
    "forward on 2": (2, lambda n: fit(n, net=Own(sleep)), r"rank 1, batch 2: is in sleep"),
    "evaluate on rank 0": (
        2,
        lambda n: fit(n, calls=alone_on_rank_zero(evaluates)),
        rf"rank 0, batch 2: waits .*model\.evaluate.*rank 1, batch 2: waits.*{NONE}",
    ),
    "exchange on rank 0": (
        3,
        lambda n: fit(n, calls=alone_on_rank_zero(gathers)),
        rf"rank 0, batch 2: waits .*all_gather.*rank 2, batch 2: waits.*{NONE}",
    ),
    "uneven exchange": (
        2,
        lambda n: fit(n, kind=Steps),
        rf"rank 0, batch 2: waits .*self\.all_gather.*# alone.*rank 1.*backward.*{NONE}",
    ),
    "crossed exchanges": (
        2,
        lambda n: fit(n, calls=crossed),
        rf"rank 0, .*first here.*rank 1, .*first there.*{NONE}",
    ),
    "data set on 2": (
        2,
        lambda n: fit(n, DataLoader(Rows(sleep), batch_size=8)),
        r"rank 0, batch 3: .*rank 1, batch 3: is in sleep, .*time\.sleep",
    ),
    "validation on 2": (
        2,
        lambda n: fit(n, validation_data=DataLoader(Rows(sleep), batch_size=8)),
        r"fit, epoch 1, validation.*rank 1, .*time\.sleep",
    ),
    "backward on 3": (
        3,
        lambda n: fit(n, net=Own(sleep, backward=True)),
        r"rank 0, batch 2: .*backward.*rank 2, batch 2: .*time\.sleep",
    ),
    "a program on 2": (
        2,
        lambda n: fit(n, calls=at_batch(run_program)),
        r"rank 0, batch 2: waits for the other.*rank 1, batch 2: .*subprocess\.run",
    ),
    "a queue on 3": (
        3,
        lambda n: fit(n, calls=at_batch(wait_for_queue)),
        r"rank 1, batch 2: waits for the other.*rank 2, batch 2: .*\.get\(timeout",
    ),
    "the network on 2": (
        2,
        lambda n: fit(n, calls=at_batch(wait_for_network)),
        r"rank 1, batch 2: .*other\.recv",
    ),
    "predict on rank 0": (
        2,
        lambda n: fit(n, calls=alone_on_rank_zero(predicts)),
        rf"rank 0, batch 2: waits .*model\.predict.*rank 1, batch 2: waits.*{NONE}",
    ),
    "save on rank 0": (
        2,
        lambda n: fit(n, calls=alone_on_rank_zero(saves)),
        rf"rank 0, batch 2: waits .*model\.save.*rank 1, batch 2: waits.*{NONE}",
    ),
    "barrier on the last of 3": (
        3,
        lambda n: fit(n, calls=at_batch(barrier)),
        rf"rank 1, batch 2: waits.*rank 2, batch 2: waits .*dist\.barrier\(\).*{NONE}",
    ),
    "interpreter's lock": (
        2,
        lambda n: fit(n, calls=at_batch(keep_interpreter)),
        r"rank 0, batch 2: waits.*rank 1: doesn't answer",
    ),
}
"""The number of ranks, what hangs, and what is shown at the first look."""

ENDS = {name for name, (_, _, words) in HANGS.items() if NONE in words} | {"lock on 2"}


def evaluate(data):
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1)
    model.evaluate(data, verbose=0)


FEW = ("worker", "evaluate on rank 0")


@pytest.mark.parametrize(
    "which", [pytest.param(w, marks=() if w in FEW else pytest.mark.slow) for w in HANGS]
)
def test_a_hang_is_shown_at_the_first_look_and_ended_only_if_it_has_no_end(
    which, capfd, monkeypatch
):
    ranks, begin, words = HANGS[which]
    fit(ranks)  # what the first call imports may take a while
    monkeypatch.setenv("FITKIT_SILENCE", "1" if which in FEW else "3")
    monkeypatch.setattr(sys.modules[__name__], "LAST_S", 4 if which in FEW else 9)
    capfd.readouterr()
    if which in ENDS:
        with pytest.raises(fitkit.WorkerError):
            begin(ranks)
    else:
        begin(ranks)
    looks = capfd.readouterr().err.split("fitkit: no batch for ")[1:]
    assert re.search(words, looks[0], re.DOTALL), looks
    assert (NONE in looks[-1]) is (NONE in words)


HEALTHY = {
    "a long backward": (2, lambda n: fit(n, net=Own(compute, backward=True))),
    "a long forward": (2, lambda n: fit(n, net=Own(compute))),
    "an upload in a callback": (2, lambda n: fit(n, calls=at_batch(sleep))),
    "a rank 100 times slower": (2, lambda n: fit(n, DataLoader(Rows(s=0.1, on=1), batch_size=8))),
    "a slow disk": (2, lambda n: fit(n, DataLoader(Rows(s=0.1), batch_size=8))),
    "one slow sample": (2, lambda n: fit(n, DataLoader(Rows(sleep), batch_size=8))),
    "a slow worker": (2, lambda n: fit(n, loader(sleep))),
    "one of three in a callback": (3, lambda n: fit(n, calls=at_batch(compute))),
    "a first compile": (2, lambda n: fit(n, jit=True)),
    "a first epoch of one batch": (1, lambda n: fit(n, calls=at_batch(compute))),
    "a slow begin": (2, lambda n: fit(n, calls=lambda m: {"on_train_begin": lambda logs: sleep()})),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", HEALTHY)
def test_a_slow_and_healthy_run_goes_on(which, capfd, monkeypatch):
    ranks, begin = HEALTHY[which]
    fit(ranks)
    monkeypatch.setenv("FITKIT_SILENCE", "1.5")
    assert len(begin(ranks).history["loss"]) == 1
    assert NONE not in capfd.readouterr().err


def test_a_time_of_silence_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("FITKIT_SILENCE", "soon")
    with pytest.raises(fitkit.ConfigurationError, match="FITKIT_SILENCE='soon'.*seconds"):
        fit(1)
