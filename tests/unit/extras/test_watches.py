"""Callbacks that look out for NaN, jumps, time and memory."""

import math
import types
import warnings

import pytest
import torch

import fitkit
from fitkit.callbacks import (
    Callback,
    CallbackList,
    DetectLossSpike,
    DetectNonFinite,
    DeviceStatsMonitor,
    NormMonitor,
    TerminateOnNaN,
    ThroughputMonitor,
    Timer,
)
from fitkit.data.batches import Batch
from fitkit.distributed.strategies import engine
from fitkit.errors import ArgumentTypeError, ConfigurationError, FitkitError
from fitkit.extras.resources import seconds_of
from fitkit.extras.watches import NonFiniteError
from tests.nets import regression

X, Y = regression(32, 2)


def trained(callbacks, net=None, x=X, y=Y, loss="mse", epochs=3, **options):
    """A fit on 8 batches an epoch; the steps that were made and the history."""
    torch.manual_seed(0)
    model = fitkit.Model(net or torch.nn.Linear(2, 1))
    model.compile("sgd", loss, learning_rate=options.pop("learning_rate", 1e-3))
    steps = []

    class Counts(Callback):
        stops_alike = True

        def on_train_batch_end(self, batch, logs):
            steps.append(batch)

    history = model.fit(
        x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[callbacks, Counts()], **options,
    )  # fmt: skip
    return steps, history


def with_nan(row, value=math.nan):
    y = Y.clone()
    y[row] = value
    return y


# ------------------------------------------------------------------ TerminateOnNaN


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_training_at_the_next_look(value):
    y = with_nan(9, value)  # the third batch
    assert len(trained(TerminateOnNaN(check_every=1), y=y)[0]) == 3
    assert len(trained(TerminateOnNaN(check_every=2), y=y)[0]) == 4
    assert len(trained(TerminateOnNaN(), y=y)[0]) == 8  # at the epoch's end
    assert len(trained(TerminateOnNaN(check_every=1))[0]) == 24


def test_the_device_is_read_at_the_looks_only(monkeypatch):
    from fitkit.training.log import LazyLogs

    reads = []
    read = LazyLogs._all
    monkeypatch.setattr(LazyLogs, "_all", lambda self: reads.append(1) or read(self))
    trained(TerminateOnNaN(check_every=4), epochs=2)
    assert len(reads) == 2 * 8 / 4


def test_it_can_raise_and_says_where():
    with pytest.raises(FloatingPointError, match=r"epoch 1 \(by batch 2\).*DetectNonFinite"):
        trained(TerminateOnNaN(raise_error=True, check_every=1), y=with_nan(9))
    assert issubclass(NonFiniteError, fitkit.FitkitError)


# ------------------------------------------------------------------ DetectNonFinite


class Breaks(torch.nn.Module):
    """Divides by zero in a given forward; `inverse` is where it begins."""

    def __init__(self, at=2, in_gradient=False):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.inverse = Inverse(at, in_gradient)
        self.last = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.last(self.inverse(self.first(x)))


class Inverse(torch.nn.Module):
    def __init__(self, at, in_gradient):
        super().__init__()
        self.at, self.in_gradient, self.calls = at, in_gradient, 0

    def forward(self, x):
        self.calls += self.training
        if self.calls - 1 != self.at:
            return x
        # sqrt has an infinite slope at 0, times 0 gives NaN: the values stay finite.
        return torch.sqrt(x * 0) if self.in_gradient else x / 0


def test_the_first_module_that_gives_nan_is_named_with_its_batch():
    callback = DetectNonFinite(check_every=4)
    with pytest.raises(NonFiniteError, match=r"output of inverse \(Inverse\).*epoch 1, batch 2"):
        trained(callback, Breaks())
    assert "inverse" in callback.found


def test_a_gradient_is_named_where_all_outputs_are_finite():
    net = Breaks(at=1, in_gradient=True)
    with pytest.raises(NonFiniteError, match=r"gradient of first\.\w+ .*batch 1"):
        trained(DetectNonFinite(), net)
    # A gradient that nobody looks at shows in the next batch's outputs.
    with pytest.raises(NonFiniteError, match=r"output of first \(Linear\).*batch 2"):
        trained(DetectNonFinite(gradients=False), Breaks(at=1, in_gradient=True))


def test_input_and_weights_are_told_from_modules():
    x = X.clone()
    x[5] = math.inf
    with pytest.raises(NonFiniteError, match="The net's input.*batch 1"):
        trained(DetectNonFinite(), x=x)
    net = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(net.bias, math.nan)
    with pytest.raises(NonFiniteError, match=r"parameter bias, before the first batch"):
        trained(DetectNonFinite(), net)


def test_it_stops_or_warns_instead_and_leaves_no_hook_behind():
    net = Breaks()
    assert len(trained(DetectNonFinite("stop", check_every=1), net)[0]) == 3
    net = Breaks()
    callback = DetectNonFinite("warn")
    with pytest.warns(UserWarning, match="inverse"):
        steps, _ = trained(callback, net)
    assert len(steps) == 24
    trained(callback, good := torch.nn.Linear(2, 1))
    assert callback.found is None
    for module in (*net.modules(), good):
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in (*net.parameters(), *good.parameters()))


# ------------------------------------------------------------------ without a callback


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


def test_a_loss_that_is_no_number_is_said_once_a_fit_and_names_who_finds_it():
    (message,) = said(lambda: trained(Callback(), y=with_nan(9), validation_data=(X, Y)))
    assert message.startswith("In epoch 1 loss is nan and val_loss is nan, first in batch 2 (")
    assert "). fit(…, callbacks=fitkit.callbacks.DetectNonFinite()" in message
    (message,) = said(lambda: trained(Callback(), validation_data=(X, with_nan(3, math.inf))))
    assert message.startswith("In epoch 1 val_loss is inf. fit(")
    assert said(lambda: trained(Callback(), validation_data=(X, Y))) == []


def test_evaluate_says_too_that_its_loss_is_no_number():
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    (message,) = said(lambda: model.evaluate(X, with_nan(3), verbose=0))
    assert message.startswith("In evaluate loss is nan. In the data, y of sample 3 is nan")
    assert said(lambda: model.evaluate(X, Y, verbose=0)) == []


class OwnWatch(Callback):
    watches_losses = True


@pytest.mark.parametrize("watch", [
    TerminateOnNaN(), DetectNonFinite("stop"), DetectLossSpike(action="stop"), OwnWatch(),
])  # fmt: skip
def test_who_looks_after_such_losses_is_left_to_it(watch):
    assert said(lambda: trained(watch, y=with_nan(9))) == []


# ------------------------------------------------------------------ DetectLossSpike


def test_a_jump_is_found_by_median_and_spread():
    y = torch.ones(400, 1)
    y[::2] = 1.1
    y[300:304] = 100.0  # batch 75
    x = torch.zeros(400, 2)
    callback = DetectLossSpike(window=20)
    net = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(net.bias)
    with pytest.warns(UserWarning, match=r"jumped to 1e\+04 .*epoch 1, batch 75"):
        trained(callback, net, x, y, epochs=2, learning_rate=0.0)
    assert [(epoch, batch) for epoch, batch, _ in callback.spikes] == [(0, 75), (1, 75)]


def test_a_spike_stops_after_the_patience_and_steady_losses_never_spike():
    y = torch.ones(400, 1)
    y[300:312] = 100.0
    options = {"x": torch.zeros(400, 2), "y": y, "learning_rate": 0.0}
    stop = DetectLossSpike(window=20, patience=3, action="stop", check_every=1)
    assert len(trained(stop, **options)[0]) == 78
    patient = DetectLossSpike(window=20, patience=4, action="raise")
    assert len(trained(patient, epochs=1, **options)[0]) == 100
    with pytest.raises(RuntimeError, match="jumped"):
        trained(DetectLossSpike(window=20, action="raise"), **options)
    quiet = DetectLossSpike(window=20, action="raise")
    trained(quiet, x=X.repeat(9, 1), y=Y.repeat(9, 1))
    assert quiet.spikes == []


# ------------------------------------------------------------------ Timer


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("01:02:03:04", 93784), ("00:00:00:05", 5), ({"minutes": 2, "seconds": 1}, 121)],
)
def test_durations_are_read_in_three_ways(given, seconds):
    from datetime import timedelta

    assert seconds_of(given) == seconds == seconds_of(timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("given", "error"),
    [("8h", ConfigurationError), ("00:00:00:00", ConfigurationError), (5, ArgumentTypeError),
     ({"hour": 1}, ConfigurationError), ({}, ConfigurationError)],
)  # fmt: skip
def test_wrong_durations_fail_at_construction(given, error):
    with pytest.raises(error, match="duration"):
        Timer(given)


def ticking(timer):
    """A clock that is a second further at each look."""
    now = iter(range(10_000))
    timer._clock = lambda: next(now)
    return timer


def test_time_that_runs_out_ends_the_training_after_the_batch_or_the_epoch(capsys):
    steps, _ = trained(ticking(Timer({"seconds": 6})))
    assert len(steps) == 6
    assert capsys.readouterr().out == "Training stops: it reached the time limit of 0:00:06.\n"
    steps, _ = trained(ticking(Timer({"seconds": 2}, interval="epoch", verbose=False)))
    assert len(steps) == 16  # two looks, one an epoch's end
    assert len(trained(Timer("01:00:00:00"))[0]) == 24
    assert capsys.readouterr().out == ""


def test_a_timer_tells_the_time_and_goes_on_after_a_restart():
    timer = Timer({"hours": 1})
    trained(timer)
    elapsed = timer.time_elapsed()
    assert 0 < elapsed < 60 and timer.time_elapsed() == elapsed
    assert timer.time_remaining() == pytest.approx(3600 - elapsed)
    other = Timer({"hours": 1})
    with CallbackList(other).running(fitkit.Model(torch.nn.Linear(2, 1)), {"stage": "fit"}):
        other.on_train_begin()
        other.load_state_dict({"time_elapsed_s": 3590.0})
        assert 0 < other.time_remaining() <= 10
    assert Timer().time_remaining() is None


def test_time_elapsed_by_lightnings_stages():
    timer = ticking(Timer("01:00:00:00"))
    assert timer.time_elapsed("validate") == timer.time_elapsed("test") == 0
    timer._clock = iter(range(10_000)).__next__
    trained(timer, epochs=2, validation_data=(X, Y))
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile(loss="mse")
    assert timer.time_elapsed("validate") == 2  # a look at each begin and end
    assert timer.time_elapsed("train") > 2
    model.evaluate(X, Y, verbose=0, callbacks=timer)
    model.evaluate(X, Y, verbose=0, callbacks=timer)
    assert timer.time_elapsed("test") == 1
    assert timer.time_elapsed("validate") == 2
    assert timer.time_remaining("test") == 24 * 3600 - 1
    with pytest.raises(ConfigurationError, match="stage='fit' must be one of 'train', 'validate'"):
        timer.time_elapsed("fit")


# ------------------------------------------------------------------ devices, speed


def test_the_cpus_use_is_logged_on_the_cpu_or_when_asked():
    history = trained(DeviceStatsMonitor(log_gpu_memory="all"))[1].history
    assert len(history["cpu_percent"]) == 3 and min(history["cpu_percent"]) >= 0
    assert all(100 < peak < 1e6 for peak in history["cpu_memory_peak_mib"])
    assert set(trained(DeviceStatsMonitor(cpu_stats=False))[1].history) == {"loss"}


def test_each_gpus_memory_or_the_least_and_most_of_them():
    ranks = [{1: (10.0, 100.0)}, {3: (30.0, 80.0)}]
    peak = {"gpu_memory_peak_mib": 30.0}
    assert DeviceStatsMonitor()._gpu_values(ranks) == peak
    assert DeviceStatsMonitor(log_gpu_memory="all")._gpu_values(ranks) == {
        **peak, "gpu_1_memory_mib": 100.0, "gpu_3_memory_mib": 80.0,
    }  # fmt: skip
    assert DeviceStatsMonitor(log_gpu_memory="min_max")._gpu_values(ranks) == {
        **peak, "gpu_memory_min_mib": 80.0, "gpu_memory_max_mib": 100.0,
    }  # fmt: skip
    two_nodes = [{0: (1.0, 2.0)}, {0: (3.0, 4.0)}]
    named = DeviceStatsMonitor(log_gpu_memory="all")._gpu_values(two_nodes)
    assert named["rank_1_gpu_0_memory_mib"] == 4.0
    with pytest.raises(ConfigurationError, match="min_max"):
        DeviceStatsMonitor(log_gpu_memory="min-max")


def test_speed_is_over_the_last_steps_without_the_first_and_the_validation():
    monitor = ThroughputMonitor(window_size=3, prefix="train")
    times = iter([0.0, 50.0, 51.0, 51.5, 52.0, 53.0, 99.0])  # four batches, a validation, the end
    monitor._clock = lambda: next(times)
    monitor.set_model(types.SimpleNamespace(world_size=2, effective_batch_size=8))
    monitor.set_params({"samples": 64, "steps": 8})
    monitor.on_epoch_begin(0)
    for batch in range(5):
        monitor.on_train_batch_end(batch, {})
    monitor.on_test_begin()
    logs = {}
    monitor.on_epoch_end(0, logs)
    # The window has the ends of batches 1 to 4; the validation begins at 53.
    assert logs == pytest.approx({"train/batches_per_sec": 2 * 3 / 3, "train/samples_per_sec": 8})


def tokens_a_second(tokens, batches, ticks=None, **arguments):
    """The logs of an epoch whose steps take a second each."""
    table, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10)
    net = torch.nn.Sequential(table, torch.nn.Flatten(0, 1), head)
    head.bias.requires_grad_(False)
    model = fitkit.Model(net)
    model.compile("sgd", lambda out, y: out.square().mean(), accelerator="cpu", devices=1)
    monitor = ThroughputMonitor(tokens=tokens, **arguments)
    monitor._clock = iter(range(10_000)).__next__
    return model.fit(batches, verbose=0, callbacks=monitor).history


def test_tokens_are_counted_by_inputs_samples_or_a_function():
    batches = [(torch.ones(2, n, dtype=torch.int64), torch.ones(2)) for n in (9, 3, 4, 5)]
    assert tokens_a_second(True, batches)["tokens_per_sec"] == [2 * (3 + 4 + 5) / 4]  # with the end
    assert tokens_a_second(7, batches)["tokens_per_sec"] == [3 * 2 * 7 / 4]
    assert tokens_a_second(lambda batch: batch[0].shape[1], batches)["tokens_per_sec"] == [12 / 4]
    assert tokens_a_second(True, batches, window_size=2)["tokens_per_sec"] == [2 * (4 + 5) / 3]
    assert "tokens_per_sec" not in tokens_a_second(None, batches)


def test_padding_that_a_mask_hides_is_no_token():
    monitor = ThroughputMonitor(tokens=True)
    ids = torch.tensor([[5, 6, 0], [7, 0, 0]])

    def tokens_of(data):
        return monitor._tokens_of(Batch(data, 2, 2))

    assert tokens_of({"input_ids": ids, "attention_mask": (ids > 0).long()}) == 3
    assert tokens_of({"input_ids": ids.numpy()}) == 6
    for data in ({"pixels": ids}, (torch.ones(2, 3), ids), {}):
        with pytest.raises(ConfigurationError, match="found no integers"):
            tokens_of(data)


def test_use_of_the_devices_is_by_the_numbers_that_multiply():
    batches = [(torch.ones(2, 3, dtype=torch.int64), torch.ones(2))] * 3
    (found,) = tokens_a_second(True, batches, peak_flops=1e4)["mfu"]
    operations = 6 * 4 * 10 + 4 * 10  # the head's weight, its frozen bias; no table
    assert found == pytest.approx(12 / 3 * operations / 1e4)
    assert "mfu" not in tokens_a_second(True, batches)  # a CPU's peak isn't known


def test_arguments_for_tokens_are_checked():
    for wrong in ({"tokens": 0}, {"tokens": "input_ids"}, {"peak_flops": 0.0}):
        with pytest.raises(FitkitError, match=next(iter(wrong))):
            ThroughputMonitor(**wrong)


# ------------------------------------------------------------------ norms


def plain_norms(clip=None, epochs=2, parts=1):
    """The norms of gradients before clipping, update by update, and of the parameters."""
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer, norms = torch.optim.SGD(net.parameters(), 0.1), []
    size = 4 * parts
    for _ in range(epochs):
        for x, y in zip(X.split(size), Y.split(size), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9).item())
            optimizer.step()
    return norms, torch.cat([p.detach().flatten() for p in net.parameters()]).norm().item()


@pytest.mark.parametrize("arguments", [{}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("parts", [1, 3])
def test_norms_of_gradients_are_those_before_clipping(arguments, parts):
    torch.manual_seed(0)
    model, monitor = fitkit.Model(torch.nn.Linear(2, 1)), NormMonitor()
    model.compile("sgd", "mse", learning_rate=0.1, accumulate_grad_batches=parts, **arguments)
    model.compile(accelerator="cpu", devices=1)
    data = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": monitor}
    history = model.fit(X, Y, epochs=2, **data).history
    norms, weights = plain_norms(arguments.get("gradient_clip_val"), parts=parts)
    assert monitor.norms == pytest.approx(norms, rel=1e-5)
    half = len(norms) // 2
    means = [sum(norms[:half]) / half, sum(norms[half:]) / half]
    assert history["grad_norm"] == pytest.approx(means, rel=1e-5)
    assert history["param_norm"][-1] == pytest.approx(weights, rel=1e-6)
    assert model._fitkit.fit_state.grad_norms is None  # nobody pays for it in the next fit


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_norm_of_an_update_is_computed_once(monkeypatch, clip):
    from torch.nn.utils import clip_grad

    counts, real = [], clip_grad._get_total_norm

    def counted(*arguments, **options):
        counts.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(clip_grad, "_get_total_norm", counted)
    monkeypatch.setattr(engine, "get_total_norm", counted)
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", gradient_clip_val=clip, accelerator="cpu", devices=1)
    monitor = NormMonitor(parameters=False)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=monitor)
    assert len(counts) == len(monitor.norms) > 0


def test_norms_of_scaled_losses_are_unscaled():
    found = []
    for precision in ("32-true", "16-mixed"):
        torch.manual_seed(0)
        model, monitor = fitkit.Model(torch.nn.Linear(2, 1)), NormMonitor(parameters=False)
        model.compile("sgd", "mse", learning_rate=0.1, precision=precision)
        model.compile(accelerator="cpu", devices=1)
        data = {"batch_size": 16, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, callbacks=monitor, **data).history
        assert "param_norm" not in history
        found.append(history["grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_a_cut_epoch_has_the_mean_norm_of_all_its_updates(tmp_path):
    def made():
        torch.manual_seed(0)
        model = fitkit.Model(torch.nn.Linear(2, 1))
        model.compile("sgd", "mse", learning_rate=0.1, accelerator="cpu", devices=1)
        return model

    class Cut(Callback):
        def on_train_batch_end(self, batch, logs):
            if batch == 4:
                self.model.save(tmp_path / "cut.h5")

    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0}
    whole = made().fit(X, Y, callbacks=[NormMonitor(), Cut()], **arguments).history
    path = tmp_path / "cut.h5"
    again = made().fit(X, Y, callbacks=NormMonitor(), resume_from=path, **arguments).history
    assert again == whole


def test_a_single_step_has_no_speed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = trained(ThroughputMonitor(), x=X[:4], y=Y[:4])[1].history
    assert set(history) == {"loss"}


def test_speeds_are_logged():
    history = trained(ThroughputMonitor())[1].history
    ratios = [s / b for s, b in zip(history["samples_per_sec"], history["batches_per_sec"],
                                    strict=True)]  # fmt: skip
    assert ratios == pytest.approx([4.0] * 3)
