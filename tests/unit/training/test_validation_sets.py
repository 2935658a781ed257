"""Several validation sets by name: each as one set alone, wherever its values are used."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ProgressBar,
    ReduceLROnPlateau,
)
from tests.compiling import TRACED
from tests.nets import dense, normal

X, Y = normal(24, 4), normal(24, 1, seed=1)
DAY, NIGHT = (X[:7], Y[:7]), (X[7:20] * 3, Y[7:20])
SETS = {"day": DAY, "night": NIGHT}


def compiled(net=None, **arguments):
    model = fitkit.Model(dense(4, 8, 1) if net is None else net)
    given = {"metrics": ["mae"], "accelerator": "cpu", "devices": 1, **arguments}
    model.compile("sgd", "mse", learning_rate=0.05, **given)
    return model


def fit(model, sets=SETS, **arguments):
    given = {"batch_size": 6, "epochs": 3, "verbose": 0, "shuffle": False, **arguments}
    return model.fit(X, Y, validation_data=sets, **given).history


NAMES = ["val_day_loss", "val_day_mae", "val_night_loss", "val_night_mae"]


@pytest.mark.parametrize("jit_compile", [False, TRACED], ids=["eager", "compiled"])
def test_each_set_has_the_values_that_it_has_alone(jit_compile):
    found = fit(compiled(jit_compile=jit_compile))
    assert list(found) == ["loss", "mae", *NAMES]
    for name, data in SETS.items():
        alone = fit(compiled(jit_compile=jit_compile), data)
        assert found["loss"] == alone["loss"]
        for value in ("loss", "mae"):
            assert found[f"val_{name}_{value}"] == alone[f"val_{value}"]


def test_the_last_values_are_those_of_evaluate():
    model = compiled()
    found = fit(model)
    for name, data in SETS.items():
        values = model.evaluate(*data, batch_size=6, verbose=0, return_dict=True)
        for value in values:
            assert found[f"val_{name}_{value}"][-1] == pytest.approx(values[value])


def test_sets_may_be_of_any_kind_and_length():
    day = TensorDataset(*DAY)
    sets = {
        "loader": DataLoader(day, 3),
        "data set": day,
        "arrays": (DAY[0].numpy(), DAY[1].numpy()),
        "weighted": (*DAY, np.ones(7, "float32")),
        "list of batches": [(DAY[0][:3], DAY[1][:3]), (DAY[0][3:], DAY[1][3:])],
    }
    found = fit(compiled(metrics=None), sets)
    for name in sets:
        assert found[f"val_{name}_loss"] == pytest.approx(found["val_loader_loss"], rel=1e-5)


def test_one_named_set_keeps_its_name():
    assert "val_day_loss" in fit(compiled(), {"day": DAY})


def test_steps_hold_for_each_set_and_freq_for_all():
    found = fit(compiled(), validation_steps=1, validation_freq=2)
    assert [len(found[name]) for name in NAMES] == [1] * 4
    expected = fit(compiled(), (DAY[0][:6], DAY[1][:6]), validation_freq=2)
    assert found["val_day_loss"] == expected["val_loss"]


def test_validations_within_epochs_have_all_sets_and_continue_exactly(tmp_path):
    def run(*callbacks, **arguments):
        model = compiled()
        reduce = ReduceLROnPlateau("val_night_loss", factor=0.5, patience=1, min_delta=10)
        seen = []
        watch = LambdaCallback(
            on_validation_within_epoch=lambda batch, logs: seen.append((batch, list(logs)))
        )
        return fit(
            model, validation_freq=0.5, callbacks=[reduce, watch, *callbacks], **arguments
        ), model, seen  # fmt: skip

    class Stop(Callback):
        def on_train_batch_end(self, batch, logs):
            if (self.model.current_epoch, batch) == (1, 2):  # after the validation within the epoch
                self.model.save(tmp_path / "within.h5")
                self.model.stop_training = True

    whole, model, seen = run()
    assert seen == [(1, NAMES)] * 3
    run(Stop())
    resumed, twin, _ = run(resume_from=tmp_path / "within.h5")
    assert resumed == whole
    assert twin.history.validations == model.history.validations
    assert len(model.history.validations) == 6
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_callbacks_monitor_a_sets_value(tmp_path):
    model = compiled()
    stop = EarlyStopping("val_day_loss", patience=0, min_delta=100, restore_best_weights=True)
    best = ModelCheckpoint(
        tmp_path / "{epoch}-{val_night_mae:.3f}.h5", monitor="val_night_mae", save_best_only=True
    )
    found = fit(model, callbacks=[stop, best])
    assert len(found["loss"]) == 2
    values = found["val_night_mae"]
    number = int(np.argmin(values))
    assert best.best == pytest.approx(values[number])
    assert (tmp_path / f"{number + 1}-{values[number]:.3f}.h5").exists()


def test_a_scheduler_watches_a_sets_value():
    plateau = {"scheduler": "ReduceLROnPlateau", "monitor": "val_day_loss"}
    assert len(fit(compiled(lr_scheduler=plateau))["loss"]) == 3


def test_averages_are_in_the_model_for_each_set():
    seen = []

    class Seeing(Callback):
        def on_test_begin(self, logs=None):
            seen.append(self.model.net[0].weight.detach().clone())

    for swap in (False, True):
        seen.clear()
        fit(compiled(), callbacks=[EMA(0.5, swap_on_epoch=swap), Seeing()], epochs=2)
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
        assert not torch.equal(seen[1], seen[2])


def test_a_name_of_no_set_is_doubted_before_the_first_epoch():
    with (
        pytest.warns(UserWarning, match=r"several sets, so the logs have val_day_loss, val_night"),
        pytest.raises(fitkit.ConfigurationError, match="the logs have loss, mae, val_day_loss"),
    ):
        fit(compiled(), callbacks=EarlyStopping())
    with (
        pytest.warns(UserWarning, match="Write monitor='val_day_loss'"),
        pytest.raises(fitkit.ConfigurationError),
    ):
        fit(compiled(lr_scheduler="ReduceLROnPlateau"))


class OwnLogs(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self(x) - y).square().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_bias", (self(x) - y).mean(), prog_bar=False)
        self.log("valid/size", float(len(x)))
        return (self(x) - y).square().mean()


def test_own_names_get_the_sets_name_once():
    model = OwnLogs(dense(4, 1))
    model.compile("sgd", devices=1, accelerator="cpu")
    found = fit(model)
    names = [f"val_{name}_{value}" for name in SETS for value in ("loss", "bias", "size")]
    assert set(found) == {"loss", *names}


def test_a_loss_that_is_not_finite_is_told_of_its_set():
    sets = {"day": DAY, "night": (NIGHT[0], NIGHT[1] * float("nan"))}
    with pytest.warns(UserWarning, match="In epoch 1 val_night_loss is nan"):
        fit(compiled(), sets)


class Screen:
    """Keeps the phases that a bar shows, and the lines that stay."""

    def __init__(self):
        self.phases, self.kept, self.interval_s, self.shows_at_once = [], [], 0.0, True

    def show(self, moment):
        self.phases.append((moment.phase, moment.total))

    def keep(self, title, elapsed_s, metrics):
        self.kept.append([name for name, _ in metrics])

    def close(self, erase):
        pass


def test_the_bar_shows_which_set_is_validated(monkeypatch):
    screen = Screen()
    monkeypatch.setattr("fitkit.callbacks.progress.display_for", lambda *given: screen)
    monkeypatch.setattr("fitkit.callbacks.progress.LARGEST_SHARE", 1e9)
    clock = itertools.count()
    bar = ProgressBar(clock=lambda: float(next(clock)))
    fit(compiled(), callbacks=bar, epochs=2, verbose=1)
    phases = list(dict.fromkeys(screen.phases))
    assert phases == [("", 4), ("validating day", 2), ("validating night", 3)]
    assert screen.kept == [["loss", "mae", *NAMES]] * 2


def test_the_bar_hides_what_a_step_hides():
    screen_names = []
    model = OwnLogs(dense(4, 1))
    model.compile("sgd", devices=1, accelerator="cpu")

    class Bar(ProgressBar):
        def _keep(self, metrics):
            screen_names.extend(name for name, _ in metrics)

    fit(model, callbacks=Bar(verbose=2), epochs=1, verbose=2)
    assert "val_day_size" in screen_names and "val_day_bias" not in screen_names


def test_each_set_has_a_curve():
    pytest.importorskip("matplotlib")
    model = compiled()
    fit(model)
    figure = model.history.plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "mae"]
    for axes in figure.axes:
        labels = [line.get_label() for line in axes.get_lines()]
        assert labels == ["training", "day", "night"]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["training", "day", "night"]
    assert len(model.history.plot("val_day_mae").axes) == 1


class Pair(nn.Module):
    """Takes a dict of inputs, one of them a pair."""

    def __init__(self):
        super().__init__()
        self.net = dense(8, 1)

    def forward(self, pair, more=None):
        return self.net(torch.cat(pair, 1))


@pytest.mark.parametrize(
    ("x", "sets", "message"),
    [
        (X, {"day": DAY, "night": X}, r"several sets, but 'night' is a Tensor.*\(inputs, targets"),
        (X, {"day": DAY, 3: NIGHT}, "has the key 3. Each set needs a name"),
        (X, {"day": DAY, "": NIGHT}, "has the key ''. Each set needs a name"),
        (X, {"day": (X,)}, r"validation_data\['day'\] is a tuple of 1 entries"),
        (X, {"day": (X[:, :2], Y)}, r"validation_data\['day'\]'s x has samples of shape \(2,\)"),
        (X, {"day": (X[:0], Y[:0])}, "is empty"),
        ({"pair": (X, X)}, {"pair": (X, X)}, r"with the names of inputs of x \('pair'\)"),
    ],
)
def test_a_dict_that_is_no_sets_is_refused(x, sets, message):
    model = compiled(Pair() if isinstance(x, dict) else None, metrics=None)
    with pytest.raises(fitkit.ConfigurationError, match=message):
        model.fit(x, Y, validation_data=sets, verbose=0)


def test_inputs_by_name_stay_inputs():
    model = compiled(Pair(), metrics=None)
    x = {"pair": (X, X), "more": X}
    assert "val_loss" in model.fit(x, Y, validation_data=(x, Y), verbose=0).history
    sets = {"day": (x, Y), "night": (x, Y)}
    assert "val_day_loss" in model.fit(x, Y, validation_data=sets, verbose=0).history
    with pytest.raises(fitkit.ConfigurationError, match="validation_data has no targets"):
        model.fit(x, Y, validation_data=x, verbose=0)
    assert model.evaluate(x, Y, verbose=0) > 0


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (SETS, r"x is a dict of 2 data sets.*one set a call. Write evaluate\(\*x\['day'\]\)"),
        ({"day": DataLoader(TensorDataset(*DAY))}, r"x is a dict of 1 data sets. Give one"),
        ({"day": [DAY]}, r"one set a call. Write evaluate\(x\['day'\]\)"),
        ({"day": iter([DAY])}, "one set a call"),
    ],
)
def test_evaluate_takes_one_set(sets, message):
    with pytest.raises(TypeError, match=message):
        compiled().evaluate(sets, verbose=0)


def test_names_that_meet_are_refused():
    class Two(nn.Module):
        def forward(self, x):
            return {"b": x[:, :1], "c": x[:, :1] * 1.0}

    class Own(OwnLogs):
        def validation_step(self, batch, batch_idx):
            self.log("b_loss", 1.0)
            return super().validation_step(batch, batch_idx)

    model = Own(dense(4, 1))
    model.compile("sgd", devices=1, accelerator="cpu")
    with pytest.raises(fitkit.ConfigurationError, match="Two validation sets log 'val_a_b_loss'"):
        fit(model, {"a": DAY, "a_b": NIGHT})
