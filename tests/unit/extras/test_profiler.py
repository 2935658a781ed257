"""Where an epoch's time goes: against what was slept, by those who slept."""

import contextlib
import functools
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchmetrics import Metric

import fitkit
from fitkit.callbacks import Callback, Profiler
from fitkit.errors import ConfigurationError
from fitkit.extras import profiler as profiler_module
from fitkit.extras.profiler import GPUClock, advice, slowest_of, table, with_waits

STEPS = 4
slept = {}


def sleep(part, seconds=0.01):
    """Sleep, and note how long that took."""
    began = time.perf_counter()
    time.sleep(seconds)
    slept[part] = slept.get(part, 0.0) + time.perf_counter() - began


class SleepyBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        sleep("backward")
        return gradient


class SleepyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        if self.training:
            sleep("forward", 0.015)
        return SleepyBackward.apply(self.linear(x))


class SleepySGD(torch.optim.SGD):
    def step(self, closure=None):
        sleep("optimizer", 0.012)
        return super().step(closure)


class SleepyMetric(Metric):
    """Counts samples; it can only be updated batch by batch."""

    def __init__(self):
        super().__init__()
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, prediction, target):
        sleep("metrics")
        self.count += len(target)

    def compute(self):
        return self.count


class SleepyCallback(Callback):
    stops_alike = True

    def on_train_batch_begin(self, batch, logs=None):
        sleep("callbacks")

    def on_epoch_begin(self, epoch, logs=None):
        sleep("callbacks")

    def on_epoch_end(self, epoch, logs):
        sleep("callbacks", 0.03)


class SleepyMove(fitkit.Model):
    def transfer_batch_to_device(self, batch, device):
        if self.training:
            sleep("to device")
        return batch


class SleepyData:
    """Batches that take their time."""

    def __len__(self):
        return STEPS

    def __iter__(self):
        for _ in range(STEPS):
            sleep("data", 0.02)
            yield torch.randn(8, 4), torch.randint(3, (8,))


class SleepyValidation:
    def __iter__(self):
        sleep("validation")
        yield torch.randn(8, 4), torch.randint(3, (8,))


def fitted(model, profiler, **options):
    slept.clear()
    callbacks = [profiler, SleepyCallback()]
    return model.fit(SleepyData(), callbacks=callbacks, verbose=0, **options)


def check_parts(profiler):
    """Each part has what was slept in it, and at most all that nobody slept besides."""
    awake = profiler.wall_s - sum(slept.values())
    for part, seconds in slept.items():
        assert seconds <= profiler.seconds[part] <= seconds + awake, part
    assert sum(profiler.seconds.values()) == pytest.approx(profiler.wall_s, rel=0.1)


def compiled(model, metrics=True):
    net = next(model.children(), model)
    model.compile(
        SleepySGD(net.parameters(), lr=0.1),
        "cross_entropy",
        metrics=[SleepyMetric()] if metrics else None,
        accelerator="cpu",
    )
    return model


def test_every_part_has_the_time_that_was_spent_in_it_and_together_they_are_the_epoch():
    model, profiler = compiled(SleepyMove(SleepyNet())), Profiler(every=0)
    fitted(model, profiler)
    check_parts(profiler)  # without validation: its metrics and moves are its own
    assert set(slept) == {
        "data",
        "to device",
        "forward",
        "backward",
        "optimizer",
        "metrics",
        "callbacks",
    }
    assert slept["callbacks"] <= profiler.callbacks["SleepyCallback"] <= profiler.wall_s


def test_a_validation_is_a_part_of_its_own():
    model, profiler = compiled(fitkit.Model(SleepyNet()), metrics=False), Profiler(every=0)
    fitted(model, profiler, validation_data=SleepyValidation())
    check_parts(profiler)
    assert "validation" in slept


@pytest.mark.parametrize("automatic", [True, False])
def test_steps_of_a_models_own_are_divided_too(automatic):
    class Own(fitkit.Model):
        automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    model, profiler = compiled(Own(SleepyNet()), metrics=False), Profiler(every=0)
    fitted(model, profiler)
    check_parts(profiler)
    assert set(slept) == {"data", "forward", "backward", "optimizer", "callbacks"}


def test_an_update_at_the_epochs_end_leaves_the_clock_at_what_comes_then():
    net = SleepyNet()
    model, profiler = fitkit.Model(net), Profiler(every=0)
    optimizer = SleepySGD(net.parameters(), lr=0.1)
    options = {"accumulate_grad_batches": STEPS - 1, "accelerator": "cpu"}
    model.compile(optimizer, "cross_entropy", **options)
    fitted(model, profiler)
    check_parts(profiler)


def test_nothing_is_left_behind_in_the_model_also_after_an_error():
    class Fails(Callback):
        def on_train_batch_end(self, batch, logs):
            raise RuntimeError("enough")

    model = compiled(fitkit.Model(SleepyNet()), metrics=False)
    optimizer = model._made_optimizers()[0]
    profiler = Profiler(every=0)
    for callbacks in ([profiler], [profiler, Fails()]):
        with contextlib.suppress(RuntimeError):
            model.fit(SleepyData(), callbacks=callbacks, verbose=0)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not model.net._forward_pre_hooks and not model.net._forward_hooks
        assert profiler._clock is None


def test_a_table_is_printed_every_so_many_epochs_and_logged_only_when_asked(capsys):
    model = compiled(fitkit.Model(SleepyNet()), metrics=False)
    history = fitted(model, Profiler(every=2), epochs=2)
    printed = capsys.readouterr().out
    assert "Epoch 2/2 took" in printed and "Epoch 1/2" not in printed
    assert "waiting for data" in printed
    assert set(history.history) == {"loss"}
    history = fitted(model, Profiler(every=0, log=True))
    assert capsys.readouterr().out == ""
    assert history.history["seconds/data"][0] >= slept["data"]


def test_it_changes_no_number_that_is_learned():
    weights = []
    for callbacks in ([], [Profiler(every=0)]):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        model = fitkit.Model(net)
        model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
        x, y = torch.randn(64, 4), torch.randint(3, (64,))
        model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks)
        weights.append(net.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_gpus_time_is_read_from_events_once_it_has_passed_them(monkeypatch):
    gpu = SimpleNamespace(now_ms=0.0, done_ms=0.0, waits=0, made=0)

    class Event:
        def __init__(self, device, enable_timing):
            assert device == torch.device("cuda:1")
            assert enable_timing
            gpu.made += 1

        def record(self, stream):
            assert stream == "the stream of cuda:1"
            self.at_ms = gpu.now_ms

        def query(self):
            return self.at_ms <= gpu.done_ms

        def elapsed_time(self, later):
            assert self.query() and later.query()
            return later.at_ms - self.at_ms

        def synchronize(self):
            gpu.waits += 1
            gpu.done_ms = gpu.now_ms

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda d: f"the stream of {d}")
    clock = GPUClock(torch.device("cuda:1"))
    for _ in range(1000):
        gpu.done_ms = gpu.now_ms - 10  # the GPU is behind the host
        clock.switch("forward")
        gpu.now_ms += 3
        clock.switch("rest")
        gpu.now_ms += 1
    assert gpu.waits == 0 and gpu.made < 600  # events are used again
    assert clock.take() == pytest.approx({"forward": 3.0, "rest": 1.0})
    assert gpu.waits == 1


def test_waits_within_the_gradient_exchange_are_taken_out_of_the_backward_pass():
    ranks = [{"data": 1.0, "backward": 7.0}, {"data": 6.0, "backward": 2.0}]
    found = with_waits(ranks)
    assert found == [{"data": 1.0, "backward": 2.0, "ranks": 5.0}, ranks[1]]
    assert slowest_of(found) == 1
    lines = table("Epoch 1/1:", found, {}).splitlines()
    assert "rank 1 (the slowest)" in lines[1]
    waits = next(line for line in lines if "waiting for ranks" in line)
    assert waits.split()[3:] == ["5.000", "s", "62.5%", "0.000", "s", "0.0%"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ({"data": 62, "forward": 38}, "62% waiting for data: give the DataLoader num_workers=4"),
        ({"data": 62, "forward": 38}, "the arrays themselves if they fit in memory; if"),
        ({"callbacks": 50, "forward": 50}, "ModelCheckpoint: run it less often (asy"),
        ({"forward": 50, "backward": 50}, "the net itself"),
    ],
)
def test_the_advice_is_about_the_largest_part(seconds, text):
    found = advice(seconds, {"ModelCheckpoint": 2.0, "ProgressBar": 1.0})
    assert text in found[0]


def test_a_busy_machine_is_named_below_the_table(monkeypatch, capsys):
    model = fitkit.Model(torch.nn.Linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    for busy in (None, "9 programs want 2 cores."):
        monkeypatch.setattr(profiler_module, "overload", lambda busy=busy: busy)
        model.fit(torch.rand(8, 4), torch.rand(8, 1), verbose=0, callbacks=Profiler())
        last = capsys.readouterr().out.splitlines()[-1]
        assert (last == "-> 9 programs want 2 cores.") is (busy is not None)


@pytest.mark.parametrize(
    ("optimizer", "helps"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1), True),
        (functools.partial(torch.optim.SGD, lr=0.1, fused=True), False),
        ("sgd", False),
        (torch.optim.RMSprop, False),
    ],
)
def test_only_an_optimizer_that_could_be_fused_is_told_to_be(optimizer, helps, monkeypatch):
    found = []
    monkeypatch.setattr(profiler_module, "table", lambda *given, **more: found.append(more))
    model = fitkit.Model(torch.nn.Linear(4, 1))
    model.compile(optimizer, "mse", accelerator="cpu", devices=1)
    model.fit(torch.rand(8, 4), torch.rand(8, 1), verbose=0, callbacks=Profiler())
    assert found == [{"may_fuse": helps, "may_name": False}]
    (line,) = advice({"optimizer": 1.0}, {}, may_fuse=helps)
    assert ("fused" in line) is helps


@pytest.mark.parametrize("own_step", [False, True])
def test_a_model_without_a_net_is_divided_by_its_layers(own_step):
    class Layers(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.layer = SleepyNet()

        def forward(self, x):
            return self.layer(x)

    class Own(Layers):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    model = Own() if own_step else Layers()
    profiler = Profiler(every=0)
    fitted(compiled(model, metrics=False), profiler)
    check_parts(profiler)


def test_replicas_in_threads_are_divided_where_their_threads_meet():
    model, profiler = fitkit.Model(SleepyNet()), Profiler(every=0)
    model.compile("sgd", "cross_entropy", devices=2, strategy="dp", accelerator="cpu")
    fitted(model, profiler)
    assert sum(profiler.seconds.values()) == pytest.approx(profiler.wall_s, rel=0.1)
    assert profiler.seconds["forward"] >= STEPS * 0.015
    assert profiler.seconds["backward"] >= STEPS * 0.01


def test_arguments_that_cant_be_are_refused():
    with pytest.raises(ConfigurationError, match="every"):
        Profiler(every=-1)


def test_two_of_them_are_refused():
    model = compiled(fitkit.Model(SleepyNet()), metrics=False)
    with pytest.raises(ConfigurationError, match="two Profilers"):
        model.fit(SleepyData(), callbacks=[Profiler(), Profiler()], verbose=0)
