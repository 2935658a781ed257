"""Callbacks on two real ranks: the same decisions everywhere, and the numbers of one process."""

import math

import pytest
import torch

import fitkit
from fitkit.callbacks import (
    EMA,
    BackboneFinetuning,
    Callback,
    CSVLogger,
    DetectLossSpike,
    DetectNonFinite,
    EarlyStopping,
    EvaluateEvery,
    GradientAccumulationScheduler,
    GradualUnfreezing,
    JSONLogger,
    LearningRateMonitor,
    LearningRateScheduler,
    MetricCallback,
    ReduceLROnPlateau,
    StochasticWeightAveraging,
    TerminateOnNaN,
    ThroughputMonitor,
    Timer,
)
from fitkit.fit_state import FitState
from tests.nets import classification
from tests.reference import assert_same_weights

pytestmark = pytest.mark.timeout(60)

X, Y = classification(48, 4, seed=1)


def compiled(devices=2, net=None, rate=0.1, **arguments):
    torch.manual_seed(0)
    if net is None:
        net = torch.nn.Sequential()
        net.add_module("backbone", torch.nn.Linear(4, 8))
        net.add_module("act", torch.nn.Tanh())
        net.add_module("head", torch.nn.Linear(8, 3))
    model = fitkit.Model(net)
    model.compile(
        lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        "cross_entropy",
        metrics=["accuracy"],
        accelerator="cpu",
        devices=devices,
        strategy="ddp_spawn" if devices > 1 else "auto",
        **arguments,
    )
    return model


class SameOnAllRanks(Callback):
    """At the end of each epoch and of fit: are weights, buffers and rates the same on all ranks?"""

    stops_alike = True

    def __init__(self):
        self.checks = 0

    def _check(self):
        mine = [tensor.double().sum() for tensor in self.model.state_dict().values()]
        rates = [float(group["lr"]) for group in self.model.optimizer.param_groups]
        numbers = torch.stack([*mine, *torch.tensor(rates, dtype=torch.float64).to(mine[0].device)])
        everyones = self.model.all_gather(numbers[None])
        assert torch.equal(everyones[0], everyones[-1]), everyones
        self.checks += 1

    def on_epoch_end(self, epoch, logs):
        self._check()

    def on_train_end(self, logs=None):
        self._check()


def fit(devices, *callbacks, epochs=4, **options):
    """The same samples at a time on one rank and on two; model, history, epochs."""
    model = options.pop("model", None) or compiled(devices)
    same = SameOnAllRanks()
    history = model.fit(
        X, Y, batch_size=16 // devices, epochs=epochs, shuffle=False, verbose=0,
        validation_data=(X, Y), callbacks=[*callbacks, same], **options,
    )  # fmt: skip
    assert same.checks == len(history.epoch) + 1
    return model, history


def assert_as_one_process(make, **options):
    """The weights and the history of two ranks are those of one."""
    alone, one = fit(1, *make(), **options)
    together, two = fit(2, *make(), **options)
    assert one.epoch == two.epoch
    for name, values in one.history.items():
        assert two.history[name] == pytest.approx(values, abs=1e-5), name
    assert_same_weights(alone, together, rtol=1e-5, atol=1e-5)
    return together, two


CASES = {
    "scheduler": lambda: [LearningRateScheduler(lambda epoch, rate: rate / 2)],
    "plateau": lambda: [ReduceLROnPlateau(patience=1, min_delta=10.0, cooldown=1)],
    "stopping": lambda: [
        EarlyStopping(min_delta=10.0, patience=2, restore_best_weights=True, start_from_epoch=1)
    ],
    "ema": lambda: [EMA(0.5)],
    "ema_on_epoch": lambda: [EMA(0.5, swap_on_epoch=True), EarlyStopping(patience=9)],
    "swa": lambda: [StochasticWeightAveraging(0.05, 0.5, annealing_epochs=1, bn_data=[X])],
    "evaluations": lambda: [
        EvaluateEvery(X[:31], Y[:31], every=2), MetricCallback(["auroc", "f1"], X[:21], Y[:21]),
        LearningRateMonitor(), EarlyStopping("extra_loss", patience=9),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_acts_on_weights_and_rates_does_so_on_all_ranks_as_in_one_process(case):
    epochs = 6 if case == "plateau" else 4
    assert_as_one_process(CASES[case], epochs=epochs)


@pytest.mark.skipif(not hasattr(FitState(), "accumulate"), reason="needs FitState.accumulate")
def test_groups_of_batches_change_on_all_ranks():
    model, _ = assert_as_one_process(lambda: [GradientAccumulationScheduler({1: 2, 2: 3})])
    assert model._fitkit.fit_state.updates == 3 + 2 + 1 + 1


def test_a_backbone_that_is_freed_learns_from_all_ranks_samples():
    assert_as_one_process(lambda: [BackboneFinetuning(2)])


def test_parts_that_are_freed_in_stages_learn_from_all_ranks_samples():
    stages = {1: {"backbone": 0.02}, 2: {"backbone": 0.01}}
    assert_as_one_process(lambda: [GradualUnfreezing(stages)])


def test_the_average_of_running_statistics_is_the_same_on_all_ranks():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    model = compiled(net=net)
    seen = []

    class Buffers(Callback):
        def on_test_end(self, logs):
            mean = self.model.net[0].running_mean
            everyones = self.model.all_gather(mean[None])
            seen.append(torch.equal(everyones[0], everyones[1]))

    model.fit(
        X, Y, batch_size=8, epochs=2, verbose=0, validation_data=(X, Y),
        callbacks=[Buffers(), EMA(0.5)],
    )  # fmt: skip
    assert seen == [True, True]


def test_the_callers_callbacks_hold_the_state_and_serve_again():
    stop = EarlyStopping(min_delta=10.0, patience=2, restore_best_weights=True)
    _, history = fit(2, stop, epochs=9)
    assert history.epoch == [0, 1, 2] and (stop.stopped_epoch, stop.best_epoch) == (2, 0)
    assert stop.best == history.history["val_loss"][0]
    _, again = fit(2, stop, epochs=9)
    assert again.history == history.history


def test_files_are_written_once(tmp_path):
    table, lines = CSVLogger(tmp_path / "log.csv"), JSONLogger(tmp_path / "log.jsonl")
    _, history = fit(2, table, lines, epochs=2)
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert rows[0] == "epoch,loss,accuracy,val_loss,val_accuracy" and len(rows) == 3
    assert [float(row.split(",")[1]) for row in rows[1:]] == history.history["loss"]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


class BreaksOnRankOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.odd = torch.nn.Linear(4, 3), Odd()

    def forward(self, x):
        return self.odd(self.layer(x))


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        is_there = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return x * float("nan") if is_there and self.calls == 2 else x


def test_nan_on_one_rank_ends_all_of_them():
    steps = []

    class Counts(Callback):
        stops_alike = True

        def on_train_batch_end(self, batch, logs):
            steps.append(batch)

    model = compiled(net=BreaksOnRankOne())
    callbacks = [TerminateOnNaN(check_every=1), Counts()]
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert history.epoch == [0] and len(steps) <= 3


class NotesRankOnesRows(Callback):
    """The rows of the newest batch of rank 1."""

    stops_alike = True

    def on_train_begin(self, logs=None):
        handle = self.model.net.layer.register_forward_pre_hook(self._note)
        self.add_cleanup(handle.remove)

    def _note(self, layer, given):
        self._mine = given[0].detach().clone()

    def on_train_batch_end(self, batch, logs):
        self.rows = self.model.all_gather(self._mine[None])[1]


def test_the_rank_the_module_and_the_samples_of_the_first_nan_are_named():
    model = compiled(net=BreaksOnRankOne())
    detect, notes = DetectNonFinite("stop", check_every=1), NotesRankOnesRows()
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[notes, detect])
    assert history.epoch == [0]
    what, samples = detect.found.split(" (rank 1), samples ")
    assert "odd (Odd)" in what
    assert torch.equal(torch.as_tensor(X)[[*map(int, samples.split(", "))]], notes.rows.view(8, 4))


def test_rank_zeros_clock_stops_all(capsys):
    steps = []

    class Counts(Callback):
        stops_alike = True

        def on_train_batch_end(self, batch, logs):
            steps.append(batch)

    timer = Timer({"seconds": 1.0})
    model = compiled()
    model.fit(
        X, Y, batch_size=8, epochs=100_000, verbose=0,
        callbacks=[timer, Counts(), ThroughputMonitor(), DetectLossSpike(action="raise")],
    )  # fmt: skip
    assert 0 < len(steps) < 100_000 and 1.0 <= timer.time_elapsed() < 30
    assert capsys.readouterr().out.count("time limit") == 1


def test_callbacks_that_stop_alike_cost_no_exchange_a_step():
    counts = []

    class CountsExchanges(Callback):
        stops_alike = True

        def on_train_begin(self, logs=None):
            collectives = self.model._fitkit.compilation.strategy.collectives
            self.exchanges = 0

            def counting(exchange):
                def counted(value):
                    self.exchanges += 1
                    return exchange(value)

                return counted

            for name in ("gather", "sums"):
                setattr(collectives, name, counting(getattr(collectives, name)))

        def on_train_batch_end(self, batch, logs):
            counts.append(self.exchanges)

    model = compiled()
    callbacks = [CountsExchanges(), TerminateOnNaN(), LearningRateMonitor(), EMA()]
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)
    first, *later = counts  # what the first forward has set is looked for once
    assert first <= 2 and later == [first] * 5


def test_the_range_test_on_two_ranks_is_that_of_one_and_leaves_the_model():
    from fitkit import tune

    found = []
    for devices in (1, 2):
        model = compiled(devices)
        before = [tensor.clone() for tensor in model.state_dict().values()]
        options = {"batch_size": 16 // devices, "num_training": 12, "min_lr": 1e-3, "max_lr": 0.1}
        torch.manual_seed(4)
        found.append(tune.learning_rate(model, X, Y, **options))
        after = model.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert model._fitkit.fit_state.updates == 0 and model.history is None
    assert found[1].losses == pytest.approx(found[0].losses, abs=1e-5)
    assert found[1].rates == found[0].rates


class StopsPasses(Callback):
    """Ends a pass on each rank after so many of its batches: 1 on rank 0, 2 on rank 1."""

    def on_test_batch_end(self, batch, logs):
        self.model.stop_evaluating = batch == self.model.global_rank

    def on_predict_batch_end(self, batch, logs):
        self.model.stop_predicting = batch == self.model.global_rank


@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp"])
def test_model_stop_evaluating_and_stop_predicting_end_a_ranks_own_part(strategy):
    x = torch.arange(24.0).reshape(24, 1)
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=2, strategy=strategy)
    outputs = model.predict(x, batch_size=2, verbose=0, callbacks=StopsPasses())
    assert len(outputs) == 6  # batches 0, 1 and 3
    loss = model.evaluate(x, x, batch_size=2, verbose=0, callbacks=StopsPasses())
    rows = [0, 1, 2, 3, 6, 7]
    expected = ((torch.as_tensor(model.predict(x, verbose=0)) - x)[rows] ** 2).mean().item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_self_log_at_an_epochs_end_is_the_value_of_all_ranks(tmp_path):
    """Each rank's value differs; all see one, so that early stopping and savers act alike."""

    class Ends(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.log("begun", 1.0, reduce_fx="sum")

        def on_test_end(self, logs):
            self.model.log("rank", float(self.model.global_rank))

        def on_epoch_end(self, epoch, logs):
            assert logs["val_rank"] == 0.5
            self.model.log("ranks", epoch + float(self.model.global_rank), reduce_fx="sum")
            if self.model.is_global_zero:
                self.model.log("zero", 7.0, rank_zero_only=True)

    model = compiled(devices=2)
    best = fitkit.callbacks.ModelCheckpoint(
        tmp_path / "best.h5", monitor="ranks", mode="min", save_best_only=True
    )
    stopping = fitkit.callbacks.EarlyStopping("ranks", mode="min", patience=1)
    history = model.fit(
        X, Y, validation_data=(X, Y), epochs=5, verbose=0, callbacks=[Ends(), best, stopping]
    ).history
    assert history["ranks"] == [1.0, 3.0]
    assert history["zero"] == [7.0, 7.0] and history["val_rank"] == [0.5, 0.5]
    assert history["begun"] == [2.0, 2.0]


@pytest.mark.parametrize("every", [1, 2])
def test_an_update_that_one_rank_makes_bad_is_left_out_on_all(every):
    x, y = classification(64, 6, seed=3)
    x[21] = math.nan  # in the third batch of 8: rank 0's second

    def fitted(devices):
        torch.manual_seed(0)
        model = fitkit.Model(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)))
        model.compile(
            "adam", "cross_entropy", accelerator="cpu", devices=devices,
            accumulate_grad_batches=every * 2 // devices,
        )  # fmt: skip
        history = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks="skip_bad_updates"
        )
        return model, history

    with pytest.warns(UserWarning, match="x of sample 21 is nan at column 0"):
        one, expected = fitted(1)
    with pytest.warns(UserWarning, match="rank 0.*x of sample 21 is nan at column 0"):
        two, found = fitted(2)
    for name, tensor in one.net.state_dict().items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(two.net.state_dict()[name], tensor)
    assert found["skipped"] == expected["skipped"] == [1.0, 1.0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert [one["indices"] for one in found.skipped] == [list(range(16, 24))] * 2
