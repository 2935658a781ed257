"""What the simulation itself must show."""

import copy
import os
import subprocess
import sys
import time

import pytest
import run
import simulation
import torch
from torch import nn

pytestmark = pytest.mark.skipif(simulation.KIND != "cuda", reason="speaks of CUDA's streams")
GPU = torch.device("cuda", 1)


def kinds_seen(act):
    """The kinds of events while `act` runs on device 1; its races aren't this test's."""
    with simulation.recorded() as seen:
        act()
        torch.cuda.synchronize(1)
    kinds = {kind for kind, _, _ in seen}
    del simulation.events[:]
    return kinds


def own():
    return torch.cuda.current_stream(GPU)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_of_another_stream_must_be_waited_for(waits):
    x, side = torch.ones(8, 8, device=GPU), torch.cuda.Stream(1)

    def act():
        if waits:
            side.wait_stream(own())
        with torch.cuda.stream(side):
            y = x + 1
        if waits:
            own().wait_stream(side)
            y.record_stream(own())
        y + 1

    assert ("race" in kinds_seen(act)) is not waits


@pytest.mark.parametrize("noted", [False, True])
def test_memory_that_another_stream_uses_must_be_recorded_before_it_is_freed(noted):
    side = torch.cuda.Stream(1)

    def act():
        pinned = torch.ones(8, 8).pin_memory()
        with torch.cuda.stream(side):
            y = pinned.to(GPU, non_blocking=True)
        own().wait_stream(side)
        if noted:
            y.record_stream(own())
        y + 1
        del y
        with torch.cuda.stream(side):  # gets the same memory
            pinned.to(GPU, non_blocking=True)

    assert ("race" in kinds_seen(act)) is not noted


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_may_not_change_before_its_copy_is_done(waits):
    def act():
        pinned = torch.ones(64).pin_memory()
        pinned.to(GPU, non_blocking=True)
        if waits:
            torch.cuda.synchronize(1)
        pinned.zero_()

    assert ("race" in kinds_seen(act)) is not waits


def test_a_copy_that_is_read_too_early_has_not_arrived():
    y = torch.ones(3, device=GPU).to("cpu", non_blocking=True)
    assert y.isnan().all()
    own().synchronize()
    assert (y == 1).all()


def test_an_event_is_not_done_when_it_is_asked_for_the_first_time():
    y = torch.ones(3, device=GPU).to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(own())
    assert not event.query()
    assert event.query()
    assert (y == 1).all()


def test_an_event_is_done_once_a_later_one_of_its_stream_is():
    first, second = torch.cuda.Event(), torch.cuda.Event()
    first.record(own())
    second.record(own())
    second.synchronize()
    assert first.query()


@pytest.mark.parametrize("act", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.cpu()])
def test_the_host_waits_where_it_reads(act):
    x = torch.ones(4, device=GPU)
    assert "wait" in kinds_seen(lambda: act(x))


def test_sums_and_products_make_nobody_wait():
    x = torch.ones(4, 4, device=GPU)
    with simulation.recorded() as seen:
        (x @ x + 1).sum()
    assert not seen


def test_devices_refuse_to_mix():
    x = torch.ones(4, device=GPU)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, device="cuda:0")
    with pytest.raises(TypeError):
        torch.Tensor.numpy.__wrapped__(x) if hasattr(
            torch.Tensor.numpy, "__wrapped__"
        ) else x.numpy()
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.ones(1, device="cuda:4")
    assert (x + torch.tensor(1.0)).device == GPU


def test_memory_is_counted_bounded_and_not_zero_by_itself():
    torch.cuda.reset_peak_memory_stats(2)
    before = torch.cuda.memory_allocated(2)
    x = torch.empty(2**20, device="cuda:2")
    assert torch.cuda.memory_allocated(2) - before == x.nbytes
    assert x.isnan().all()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.ones(2**30, device="cuda:2")
    del x
    assert torch.cuda.memory_allocated(2) == before
    assert torch.cuda.max_memory_allocated(2) > before


def test_torchs_own_training_runs_on_it():
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).to(GPU)
    weight, x = net[0].weight, torch.ones(4, 8, device=GPU)
    optimizer, scaler = (
        torch.optim.AdamW(net.parameters(), fused=True),
        torch.amp.GradScaler("cuda"),
    )
    before = weight.clone()
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert weight is net[0].weight
    assert not torch.equal(before, weight)


def test_a_forked_process_is_refused():
    torch.ones(1, device=GPU)
    pid = os.fork()
    if not pid:
        try:
            torch.ones(1, device=GPU)
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_hangs_is_ended():
    began = time.monotonic()
    assert run.bounded([sys.executable, "-c", "import time; time.sleep(99)"], 1) is None
    assert run.bounded([sys.executable, "-c", "raise SystemExit(3)"], 90) == 3
    assert time.monotonic() - began < 90


FOR_THE_CPU = """
import copy, torch, fitkit

class Where(fitkit.callbacks.Callback):
    def on_train_end(self, logs=None):
        made = copy.copy(self.model)
        made.evaluate(x, y, verbose=0)
        here = next(made.net.parameters())
        print("rank", self.model.global_rank, here.device, flush=True)

x, y = torch.ones(4, 2), torch.ones(4, 1)
model = fitkit.Model(torch.nn.Linear(2, 1))
strategy = fitkit.strategies.DDPSpawnStrategy(output="all")
model.compile("sgd", "mse", accelerator="cpu", devices=2, strategy=strategy)
model.fit(x, y, callbacks=[Where()], verbose=0)
"""


def test_tests_for_the_cpu_have_a_device_on_every_rank():
    """A copy reads the words anew, in the process where it is."""
    done = subprocess.run(
        [sys.executable, "-c", FOR_THE_CPU],
        env={**os.environ, "SIM_TESTS": "ranks"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 cuda:0" in done.stdout and "rank 1 cuda:1" in done.stdout


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_compute_what_the_cpu_computes(kind, bias):
    here = getattr(torch.nn, kind)(4, 3, bias=bias)
    there = copy.deepcopy(here).to(GPU)
    x = torch.randn(5, 4) if "Cell" in kind else torch.randn(2, 5, 4)
    gradients = []
    for net in (here, there):
        found = net(x.to(next(net.parameters()).device))
        found = found[0] if isinstance(found, tuple) else found
        found.square().sum().backward()
        gradients.append([found, *(parameter.grad for parameter in net.parameters())])
    for mine, own in zip(*gradients, strict=True):
        torch.testing.assert_close(own.cpu(), mine)
