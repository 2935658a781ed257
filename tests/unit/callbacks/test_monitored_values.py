"""A monitored value that can't come is said before the first epoch, in one warning."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fitkit
from fitkit import callbacks
from tests.nets import linear, normal

X = normal(8, 4)
Y = X.sum(1, keepdim=True)


class Began(callbacks.Callback):
    """Ends the fit when its first epoch begins."""

    comes_last = True

    def on_epoch_begin(self, epoch, logs=None):
        raise KeyboardInterrupt


def warned(*watching, kind=fitkit.Model, epochs=3, scheduler=None, metrics=("mae",), **options):
    """The warnings before the first epoch."""
    model = kind(linear(4, 1))
    model.compile(
        "sgd", "mse", metrics=metrics, accelerator="cpu", devices=1, lr_scheduler=scheduler
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[*watching, Began()], **options)
    return [str(one.message) for one in caught if "monitors" in str(one.message)]


def watchers(name, tmp_path):
    return {
        "EarlyStopping": callbacks.EarlyStopping(name),
        "ModelCheckpoint": callbacks.ModelCheckpoint(tmp_path / "a.h5", name, save_best_only=True),
        "ReduceLROnPlateau": callbacks.ReduceLROnPlateau(name),
    }


HELD_OUT = {"validation_data": (X, Y)}
kinds = pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"])


@kinds
@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("val_loss", {}, "no validation data"),
        ("val_loss", {**HELD_OUT, "validation_freq": 50}, "validation_freq=50"),
        ("val_mae", {**HELD_OUT, "validation_freq": [4, 9]}, "validation_freq=[4, 9]"),
        ("val_loss", {**HELD_OUT, "validation_freq": 4, "initial_epoch": 1}, "validation_freq=4"),
        ("val_accuracy", HELD_OUT, "no metric or callback gives it"),
        ("mse", HELD_OUT, "no metric or callback gives it"),
    ],
)
def test_one_that_cant_come_is_said(tmp_path, kind, name, options, says):
    (said,) = warned(watchers(name, tmp_path)[kind], **options)
    assert says in said
    assert f"{kind} monitors {name!r}" in said
    assert "FK031" in said


@kinds
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("loss", {}),
        ("val_mae", HELD_OUT),
        ("val_loss", {**HELD_OUT, "validation_freq": 3}),
        ("val_loss", {**HELD_OUT, "validation_freq": 0.5}),
        ("val_loss", {**HELD_OUT, "validation_freq": [2]}),
        ("val_left_loss", HELD_OUT),  # perhaps of an output
    ],
)
def test_one_that_may_come_isnt(tmp_path, kind, name, options):
    assert warned(watchers(name, tmp_path)[kind], **options) == []


@pytest.mark.parametrize("metrics", [{"left": ["mae"], "right": ["mse"]}, [["mae"], ["mse"]]])
def test_one_of_an_output_that_no_batch_has_shown_yet_isnt(metrics):
    watching = callbacks.EarlyStopping("val_left_mae", mode="min")
    assert warned(watching, metrics=metrics, **HELD_OUT) == []


@pytest.mark.parametrize(
    "giver",
    [
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        callbacks.NormMonitor(),
        callbacks.EvaluateEvery(X, Y, name="own"),
    ],
)
def test_one_that_another_callback_may_give_isnt(tmp_path, giver):
    assert warned(giver, callbacks.EarlyStopping("own_error"), **HELD_OUT) == []


def test_one_that_the_models_own_code_may_log_isnt():
    class Own(fitkit.Model):
        pass

    assert warned(callbacks.EarlyStopping("own_error"), kind=Own, **HELD_OUT) == []


def test_a_further_evaluation_that_never_comes_is_said():
    every = callbacks.EvaluateEvery(X, Y, every=4, name="more")
    (said,) = warned(every, callbacks.EarlyStopping("more_loss"))
    assert "every=4" in said


def test_all_are_said_in_one_warning(tmp_path):
    plateau = {"scheduler": lambda optimizer: ReduceLROnPlateau(optimizer), "monitor": "val_mae"}
    found = watchers("val_loss", tmp_path)
    del found["ReduceLROnPlateau"]  # beside a scheduler
    (said,) = warned(*found.values(), scheduler=plateau, validation_freq=50, **HELD_OUT)
    for who in (*found, "lr_scheduler"):
        assert f"{who} monitors" in said


def test_a_resumed_fit_that_has_no_epoch_left_says_nothing(tmp_path):
    torch.manual_seed(0)
    model = fitkit.Model(linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(
            X, Y, epochs=2, initial_epoch=2, verbose=0, callbacks=callbacks.EarlyStopping(),
            **HELD_OUT,
        )  # fmt: skip
