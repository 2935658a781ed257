"""`self.log` from a callback, as Lightning's users call it from any hook of training."""

import pytest
import torch

import fitkit
from fitkit.callbacks import Callback, EarlyStopping, LambdaCallback, Profiler
from tests.nets import classification, linear

X, Y = classification(50, 4)
QUIET = {"verbose": 0, "batch_size": 16}


def compiled(**arguments):
    model = fitkit.Model(linear(4, 3, seed=1))
    model.compile("sgd", "cross_entropy", accelerator="cpu", **arguments)
    return model


class Everywhere(Callback):
    """Logs its hook's name at each hook, as often as it is called."""

    def counted(self, name):
        self.model.log(name, 1.0, reduce_fx="sum")
        self.model.log(f"{name}_mean", 3.0)

    def on_train_begin(self, logs=None):
        self.counted("train_begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.counted("epoch_begin")

    def on_train_batch_begin(self, batch, logs=None):
        self.counted("batch_begin")

    def on_train_batch_end(self, batch, logs):
        self.counted("batch_end")

    def on_test_begin(self, logs=None):
        self.counted("test_begin")

    def on_test_batch_begin(self, batch, logs=None):
        self.counted("test_batch_begin")

    def on_test_batch_end(self, batch, logs):
        self.counted("test_batch_end")

    def on_test_end(self, logs):
        self.counted("test_end")

    def on_epoch_end(self, epoch, logs):
        self.counted("epoch_end")


EACH_EPOCH = {
    "epoch_begin": 1, "batch_begin": 4, "batch_end": 4, "epoch_end": 1,
    "val_test_begin": 1, "val_test_batch_begin": 4, "val_test_batch_end": 4, "val_test_end": 1,
}  # fmt: skip


@pytest.mark.parametrize("more", [[], [Profiler()]])
def test_self_log_works_from_any_hook_of_training_and_validation(more):
    model = compiled()
    history = model.fit(
        X, Y, epochs=2, validation_data=(X, Y), callbacks=[Everywhere(), *more], **QUIET
    ).history
    for name, times in EACH_EPOCH.items():
        assert history[name] == [times] * 2, name
        assert history[f"{name}_mean"] == [3.0] * 2
    assert history["train_begin"] == [1.0]  # the first epoch's
    assert "epoch_end_mean" in history and "test_end" not in history


def test_self_log_in_evaluates_hooks_is_among_its_values():
    found = compiled().evaluate(X, Y, callbacks=Everywhere(), return_dict=True, **QUIET)
    assert found["test_begin"] == found["test_end"] == 1
    assert found["test_batch_end"] == 4


def test_early_stopping_monitors_what_a_callback_before_it_logs_on_train_epoch_end():
    seen = []

    def logs_it(epoch, logs):
        model.log("mine", float(epoch), on_step=True, on_epoch=True)

    model = compiled()
    history = model.fit(
        X, Y, epochs=9,
        callbacks=[
            LambdaCallback(on_epoch_end=logs_it), EarlyStopping("mine", mode="min", patience=2),
            LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["mine_step"])),
        ],
        **QUIET,
    ).history  # fmt: skip
    assert history["mine_epoch"] == history["mine_step"] == seen == [0.0, 1.0, 2.0]


def test_where_the_logs_are_over_self_log_says_so():
    model = compiled()
    ends = LambdaCallback(on_train_end=lambda logs: model.log("x", 1.0))
    with pytest.raises(fitkit.ConfigurationError, match="or after its last epoch"):
        model.fit(X, Y, callbacks=ends, **QUIET)
    begins = LambdaCallback(on_predict_begin=lambda logs: model.log("x", 1.0))
    with pytest.raises(fitkit.ConfigurationError, match="predict, which has no logs"):
        model.predict(X, callbacks=begins, **QUIET)


def test_what_an_epochs_begin_logs_counts_once_in_an_epoch_that_was_cut(tmp_path):
    begins = LambdaCallback(
        on_epoch_begin=lambda epoch, logs: model.log("begun", 1.0, reduce_fx="sum")
    )

    def saves(batch, logs):
        if batch == 1:
            model.save(tmp_path / "cut.h5")

    model = compiled()
    whole = model.fit(
        X, Y, callbacks=[begins, LambdaCallback(on_train_batch_end=saves)], shuffle=False, **QUIET
    )
    model = compiled()
    resumed = model.fit(
        X, Y, callbacks=[begins, LambdaCallback()], shuffle=False, **QUIET,
        resume_from=tmp_path / "cut.h5",
    )  # fmt: skip
    assert whole.history["begun"] == resumed.history["begun"] == [1.0]


def test_a_torchmetrics_object_logged_at_an_epochs_end_is_computed_and_reset():
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanMetric()

    def ends(epoch, logs):
        metric.update(torch.tensor(float(epoch)))
        model.log("metric", metric)

    model = compiled()
    history = model.fit(X, Y, epochs=2, callbacks=LambdaCallback(on_epoch_end=ends), **QUIET)
    assert history.history["metric"] == [0.0, 1.0]
