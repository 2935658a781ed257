"""EarlyStopping, ReduceLROnPlateau, what they monitor: which epoch, which rate, which weights."""

import math
import warnings

import pytest
import torch

import fitkit
from fitkit.callbacks import (
    Callback,
    EarlyStopping,
    EvaluateEvery,
    LearningRateMonitor,
    ReduceLROnPlateau,
)
from fitkit.callbacks.monitor import direction_of
from fitkit.errors import ArgumentTypeError, ConfigurationError

X = torch.ones(4, 1)
Y = torch.zeros(4, 1)


def one_weight(rate=1.0, **arguments):
    """y = w·x without bias, w = 1, trained by plain SGD."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    model = fitkit.Model(net)
    model.compile("sgd", "mse", learning_rate=rate, **arguments)
    return model


class Plays(Callback):
    """Puts given values into the epochs' logs, and numbers the weights by epoch."""

    def __init__(self, values, name="val_loss"):
        self.values = values
        self.name = name
        self.rates = []

    def on_epoch_begin(self, epoch, logs=None):
        self.rates.append(self.model.optimizer.param_groups[0]["lr"])

    def on_epoch_end(self, epoch, logs):
        value = self.values[epoch]
        if value is not None:
            logs[self.name] = value
        with torch.no_grad():
            self.model.net.weight.fill_(epoch)


def played(callback, values, name="val_loss", **arguments):
    """Fit over epochs with these values; the model and the epochs that ran."""
    model = one_weight()
    plays = Plays(values, name)
    options = {"validation_data": (X, Y), **arguments}
    history = model.fit(X, Y, epochs=len(values), verbose=0, callbacks=[plays, callback], **options)
    return model, history.epoch, plays


# ------------------------------------------------------------------ EarlyStopping


@pytest.mark.parametrize(
    ("options", "values", "ran"),
    [
        ({}, [3, 2, 2, 1], 3),  # equal is no improvement; patience 0 is as 1
        ({"patience": 1}, [3, 2, 2, 1], 3),
        ({"patience": 2}, [3, 2, 2, 1, 1, 1, 0], 6),
        ({"min_delta": 0.5}, [3, 2.5, 2], 2),  # better by exactly min_delta isn't better
        ({"min_delta": 0.4}, [3, 2.5, 2], 3),
        ({"mode": "max"}, [1, 2, 1, 3], 3),
        ({"patience": 2}, [math.nan, math.nan, 1, 1], 2),  # NaN never improves
        ({"patience": 2}, [math.nan, 1, 1, 0], 4),
        ({"start_from_epoch": 3}, [1, 2, 3, 5, 4, 4], 6),
        ({"patience": 2, "baseline": 1}, [3, 2.5, 2], 3),  # improvements don't stop, but wait grows
        ({"patience": 2, "baseline": 1}, [3, 2, 2, 0], 3),
        ({"patience": 2, "baseline": 1}, [0.5, 2, 2, 0], 3),
        ({"patience": 3}, [1, 2, 2, 0.5, 1], 5),
    ],
)
def test_it_stops_in_the_epoch_that_arithmetic_says(options, values, ran):
    callback = EarlyStopping(**options)
    _, epochs, _ = played(callback, values)
    assert epochs == list(range(ran))
    if ran < len(values):
        assert callback.stopped_epoch == ran - 1


def test_the_first_epoch_never_stops_and_state_starts_anew_with_each_fit():
    callback = EarlyStopping()
    assert played(callback, [math.nan, 1])[1] == [0, 1]
    played(callback, [5, 6, 7])
    assert (callback.best, callback.best_epoch, callback.stopped_epoch) == (5, 0, 1)


def test_the_best_weights_come_back_whether_or_not_it_stopped_early():
    for values, best in (([3, 1, 2, 2], 1), ([3, 2, 1], 2), ([math.nan, math.nan], 0)):
        model, _, _ = played(EarlyStopping(patience=2, restore_best_weights=True), values)
        assert model.net.weight.item() == best
    model, epochs, _ = played(EarlyStopping(patience=2), [3, 1, 2, 2])
    assert model.net.weight.item() == epochs[-1] == 3


def test_buffers_come_back_too_and_the_caller_keeps_its_parameters():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    model = fitkit.Model(net)
    model.compile("sgd", "mse")
    means, weight = [], net[1].weight

    class Notes(Callback):
        def on_epoch_end(self, epoch, logs):
            logs["score"] = -float(epoch)
            means.append(net[0].running_mean.clone())

    stop = EarlyStopping("score", restore_best_weights=True, patience=2)
    model.fit(torch.rand(8, 1), torch.rand(8, 1), epochs=3, verbose=0, callbacks=[Notes(), stop])
    assert torch.equal(net[0].running_mean, means[0]) and not torch.equal(means[0], means[2])
    assert net[1].weight is weight


def test_epochs_without_validation_do_not_count():
    model = one_weight()
    stop = EarlyStopping(patience=2)
    model.compile(learning_rate=0.0)
    history = model.fit(
        X, Y, epochs=20, verbose=0, callbacks=stop, validation_data=(X, Y), validation_freq=3
    )
    assert history.epoch[-1] == 8  # validations after epochs 2, 5 and 8; the first one improves


def test_verbose_says_it_once(capsys):
    played(EarlyStopping(verbose=1, restore_best_weights=True), [1, 2, 3])
    assert capsys.readouterr().out.splitlines() == [
        "Stopped early after epoch 2.",
        "Restored the best weights, those of epoch 1.",
    ]


# ------------------------------------------------------------------ what is monitored


def test_an_absent_name_lists_the_names_that_there_are_after_one_epoch():
    model = one_weight(metrics=["mae"])
    plays = Plays([0, 0, 0], "other")
    callbacks = [plays, EarlyStopping("val_mea", mode="min")]
    with pytest.raises(
        ConfigurationError, match=r"'val_mea'.*loss, mae, val_loss, val_mae, other\. Did.*'val_mae'"
    ):
        model.fit(X, Y, epochs=3, verbose=0, validation_data=(X, Y), callbacks=callbacks)
    assert len(plays.rates) == 1


@pytest.mark.parametrize("callback", [EarlyStopping, ReduceLROnPlateau])
@pytest.mark.parametrize("name", ["val_mea", "mean", "val_accuracy"])
def test_a_name_that_no_epoch_has_ends_the_first_one_with_the_names_that_there_are(callback, name):
    model = one_weight(metrics=["mae"])
    watches = callback(name, mode="min")
    with pytest.raises(ConfigurationError, match=rf"'{name}'.*loss, mae, val_loss, val_mae"):
        model.fit(X, Y, epochs=3, verbose=0, validation_data=(X, Y), callbacks=watches)
    assert model.current_epoch == 0


def test_a_misspelt_name_is_told_the_nearest_one():
    with pytest.raises(ConfigurationError, match=r"'val_los'.*Did you mean 'val_loss'\?"):
        EarlyStopping("val_los")
    model = one_weight()
    with pytest.raises(ConfigurationError, match=r"'val_los'.*Did you mean 'val_loss'"):
        model.fit(
            X, Y, verbose=0, validation_data=(X, Y), callbacks=EarlyStopping("val_los", mode="min")
        )


@pytest.mark.parametrize(("frequency", "epoch"), [(1, 0), (3, 2), ([2, 5], 1)])
def test_a_validations_value_is_missed_in_the_first_epoch_that_validates(frequency, epoch):
    model = one_weight()
    validation = {"validation_data": (X, Y), "validation_freq": frequency}
    with pytest.raises(ConfigurationError, match="Did you mean 'val_loss'"):
        model.fit(
            X, Y, epochs=9, verbose=0, callbacks=EarlyStopping("val_lost", mode="min"), **validation
        )
    assert model.current_epoch == epoch


def test_names_that_only_a_batch_can_tell_are_waited_for():
    class Two(torch.nn.Linear):
        def forward(self, x):
            found = super().forward(x)
            return {"first": found, "second": found}

    model = fitkit.Model(Two(1, 1))
    model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(
        X, {"first": Y, "second": Y}, epochs=2, verbose=0,
        callbacks=[EarlyStopping("second_mae", patience=5), LearningRateMonitor(),
                   EarlyStopping("learning_rate", mode="max", patience=5)],
    )  # fmt: skip
    assert len(history.epoch) == 2 and "second_mae" in history.history


def test_a_misspelt_value_of_a_further_data_set_is_found_out_when_that_was_evaluated():
    model = one_weight(metrics=["mae"])
    callbacks = [EvaluateEvery(X, Y, every=2, name="far"), EarlyStopping("far_mea", mode="min")]
    with pytest.raises(ConfigurationError, match=r"'far_mea'.*far_loss, far_mae\. Did.*'far_mae'"):
        model.fit(X, Y, epochs=9, verbose=0, callbacks=callbacks)
    assert model.history.epoch in ([0], [0, 1])  # The record is made before or after.


def test_a_validations_value_without_validation_data_is_a_warning_before_the_first_step():
    model = one_weight()
    with (
        pytest.warns(UserWarning, match=r"no validation data.*monitor='loss'"),
        pytest.raises(ConfigurationError, match="'val_loss', but the logs have loss"),
    ):
        model.fit(X, Y, epochs=3, verbose=0, callbacks=EarlyStopping())
    assert model.current_epoch == 0
    # Another callback makes it: then it is no mistake.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callbacks = [EvaluateEvery(X, Y, name="val", every=2), EarlyStopping(patience=9)]
        model.fit(X, Y, epochs=3, verbose=0, callbacks=callbacks)


def test_a_value_that_another_callback_adds_now_and_then_can_be_monitored():
    model = one_weight(rate=0.0)
    stop = EarlyStopping("extra_loss", patience=1)
    history = model.fit(X, Y, epochs=9, verbose=0, callbacks=[EvaluateEvery(X, Y, every=2), stop])
    assert history.epoch[-1] == 3 and history.history["extra_loss"] == [1.0, 1.0]
    with pytest.raises(ConfigurationError, match="after it in the list"):
        model.fit(X, Y, epochs=9, verbose=0, callbacks=EarlyStopping("extra_loss"))


def test_what_is_not_one_number_is_refused():
    with pytest.raises(ConfigurationError, match="not a number"):
        played(EarlyStopping("matrix", mode="min"), [torch.zeros(2, 2)] * 2, name="matrix")


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("loss", "min"), ("val_loss", "min"), ("val_a_mae", "min"), ("val_accuracy", "max"),
        ("out_0_accuracy", "max"), ("val_hamming_distance", "min"), ("val_r2_score", "max"),
        ("val_hamming_loss", "min"), ("valid/f1", "max"), ("val_top_5_accuracy", "max"),
        ("val_cosine_similarity", "max"), ("calibration_error", "min"), ("log-loss", "min"),
    ],
)  # fmt: skip
def test_known_names_tell_their_direction(name, direction):
    assert direction_of(name) == direction


def test_every_metric_with_a_name_tells_its_direction_or_asks():
    from fitkit.metrics.named import NAMES

    asks = set()
    for name in NAMES:
        try:
            direction_of(name)
        except ConfigurationError:
            asks.add(name)
    assert not {n for n in asks if "accuracy" in n or "error" in n or "loss" in n}
    assert len(asks) < len(list(NAMES)) / 8, asks


def test_an_unknown_name_asks_for_the_mode():
    with pytest.raises(ConfigurationError, match="mode='min' or mode='max'"):
        EarlyStopping("val_wibble")
    assert EarlyStopping("val_wibble", mode="max").best == -math.inf


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: EarlyStopping(patience=-1), ConfigurationError),
        (lambda: EarlyStopping(patience=1.5), ArgumentTypeError),
        (lambda: EarlyStopping(min_delta=-1), ConfigurationError),
        (lambda: EarlyStopping(monitor=None), ArgumentTypeError),
        (lambda: EarlyStopping(mode="up"), ConfigurationError),
        (lambda: EarlyStopping(baseline="low"), ArgumentTypeError),
        (lambda: EarlyStopping(restore_best_weights=1), ArgumentTypeError),
        (lambda: ReduceLROnPlateau(factor=1.0), ConfigurationError),
        (lambda: ReduceLROnPlateau(cooldown=-1), ConfigurationError),
        (lambda: ReduceLROnPlateau(min_lr=-1e-3), ConfigurationError),
    ],
)
def test_wrong_arguments_fail_at_construction(make, error):
    with pytest.raises(error):
        make()


# ------------------------------------------------------------------ ReduceLROnPlateau


@pytest.mark.parametrize(
    ("options", "values", "rates"),
    [
        ({"patience": 2}, [5, 4, 4, 4, 4, 4], [1, 1, 1, 1, 0.5, 0.5]),
        ({"patience": 0}, [5, 5, 5, 4], [1, 1, 0.5, 0.25]),
        ({"patience": 1, "min_delta": 1}, [5, 4, 2, 2], [1, 1, 0.5, 0.5]),
        # Reduced after epoch 1; the cooldown takes epochs 2 and 3 (3 counts again: it is over).
        ({"patience": 1, "cooldown": 2}, [5, 5, 5, 5, 5, 5], [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"patience": 1, "min_lr": 0.4}, [5, 5, 5, 5, 5], [1, 1, 0.5, 0.4, 0.4]),
        ({"patience": 1, "mode": "max"}, [5, 6, 6, 7], [1, 1, 1, 0.5]),
        ({"patience": 1}, [5, math.nan, None, 5], [1, 1, 0.5, 0.5]),
    ],
)
def test_the_rate_falls_in_the_epoch_that_arithmetic_says(options, values, rates):
    callback = ReduceLROnPlateau("score_loss", factor=0.5, **options)
    model, _, plays = played(callback, values, name="score_loss")
    assert plays.rates == pytest.approx(rates)
    assert model.history.history["learning_rate"] == pytest.approx(rates)


def test_every_group_is_reduced_and_none_below_the_least():
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model = fitkit.Model(net)
    first, second = net[0].parameters(), net[1].parameters()
    groups = [{"params": first, "lr": 0.1}, {"params": second, "lr": 1.0}]
    model.compile(torch.optim.SGD(groups), "mse")
    callback = ReduceLROnPlateau("flat", factor=0.1, patience=1, min_lr=0.05, mode="min")

    class Flat(Callback):
        def on_epoch_end(self, epoch, logs):
            logs["flat"] = 1.0

    model.fit(X, Y, epochs=2, verbose=0, callbacks=[Flat(), callback])
    assert [group["lr"] for group in model.optimizer.param_groups] == pytest.approx([0.05, 0.1])


def test_a_scheduler_beside_it_is_refused():
    model = one_weight(lr_scheduler="cosine")
    with pytest.raises(ConfigurationError, match="lr_scheduler"):
        model.fit(X, Y, verbose=0, callbacks=ReduceLROnPlateau("loss"))


# ------------------------------------------------------------------ as Lightning's users write it


@pytest.mark.parametrize(("options", "values", "ran", "said"), [
    ({"stopping_threshold": 0.5}, [3.0, 0.5, 0.4, 0.3], 3, "0.4, better than stopping_thr"),
    ({"stopping_threshold": 0.5}, [0.4, 0.3], 1, "after epoch 1: val_loss is 0.4"),
    ({"stopping_threshold": 0.5, "mode": "max"}, [0.4, 0.5, 0.6, 0.7], 3, "0.6, better"),
    ({"divergence_threshold": 5.0}, [3.0, 5.0, 5.5, 1.0], 3, "5.5, worse than divergence_thr"),
    ({"divergence_threshold": 0.2, "mode": "max"}, [0.3, 0.1, 1.0], 2, "0.1, worse"),
    ({"check_finite": True}, [1.0, math.nan, 0.5], 2, "nan, not finite"),
    ({"check_finite": True}, [1.0, -math.inf, 0.5], 2, "-inf, not finite"),
    ({}, [1.0, math.nan, 0.5], 3, ""),
])  # fmt: skip
def test_stopping_threshold_divergence_threshold_and_check_finite(
    options, values, ran, said, capsys
):
    stop = EarlyStopping(patience=9, verbose=1, **options)
    assert len(played(stop, values)[1]) == ran
    printed = capsys.readouterr().out
    assert said in printed and bool(said) == bool(printed)


@pytest.mark.parametrize("name", ["stopping_threshold", "divergence_threshold", "check_finite"])
def test_wrong_thresholds_fail_at_construction(name):
    with pytest.raises(ArgumentTypeError, match=name):
        EarlyStopping(**{name: "much"})


class LogsBoth(fitkit.Model):
    """Logs `x` both by step and by epoch, growing, in training and validation."""

    def training_step(self, batch):
        self.log("x", float(self.current_epoch), on_step=True, on_epoch=True)
        return super().training_step(batch)

    def validation_step(self, batch):
        self.log("x", float(self.current_epoch), on_step=True, on_epoch=True)
        return super().validation_step(batch)


@pytest.mark.parametrize("name", ["x", "val_x", "x_epoch"])
def test_monitor_x_finds_what_is_logged_by_step_and_by_epoch(name):
    model = LogsBoth(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    stop = EarlyStopping(name, mode="min", patience=2)
    history = model.fit(X, Y, epochs=9, validation_data=(X, Y), verbose=0, callbacks=stop)
    assert len(history.epoch) == 3


def test_a_plateau_schedulers_monitor_x_finds_it_too():
    model = LogsBoth(torch.nn.Linear(1, 1))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model.compile("sgd", "mse", learning_rate=1.0, lr_scheduler={
        "scheduler": lambda optimizer: plateau(optimizer, patience=0), "monitor": "x",
    })  # fmt: skip
    model.fit(X, Y, epochs=2, verbose=0)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
