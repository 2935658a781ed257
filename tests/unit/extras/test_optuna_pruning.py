"""Pruned trials: what Optuna is told, and when a fit ends."""

import pytest
import torch

import fitkit
from fitkit.callbacks import Callback, OptunaPruning

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Told:
    """A trial whose pruner ends it at a step."""

    def __init__(self, end):
        self.end, self.values = end, []

    def report(self, value, step):
        self.values.append((step, value))

    def should_prune(self):
        return self.values[-1][0] >= self.end


def fit(callback, epochs=5, **options):
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(4, 1))
    model.compile(
        "sgd",
        "mse",
        learning_rate=options.pop("rate", 0.05),
        accelerator="cpu",
        devices=options.pop("devices", 1),
    )
    options = {"validation_data": (X, Y), **options}
    model.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, callbacks=callback, **options)
    return model


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trial_is_told_each_epochs_value_and_ends_where_its_pruner_says(devices):
    trial = Told(end=2)
    epochs = []

    class Notes(Callback):
        def on_epoch_end(self, epoch, logs):
            epochs.append((epoch, logs["val_loss"]))

    with pytest.raises(optuna.TrialPruned, match="after epoch 3: val_loss is"):
        fit([Notes(), OptunaPruning(trial)], devices=devices)
    assert trial.values == epochs and [epoch for epoch, _ in epochs] == [0, 1, 2]
    fit(OptunaPruning(Told(end=9)), devices=devices)  # other trials go on, with new workers


def test_epochs_without_the_value_tell_nothing():
    trial = Told(end=9)
    fit(OptunaPruning(trial), validation_freq=2, epochs=5)
    assert [step for step, _ in trial.values] == [1, 3]


def test_a_studys_own_pruner_ends_bad_trials_only():
    rates = iter([0.05, 0.05, 1e-6, 0.05])

    def objective(trial):
        model = fit(OptunaPruning(trial, "loss"), rate=next(rates), validation_data=None)
        return model.history.history["loss"][-1]

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    study.optimize(objective, n_trials=4)
    assert [trial.state.name for trial in study.trials] == [
        "COMPLETE",
        "COMPLETE",
        "PRUNED",
        "COMPLETE",
    ]


def test_what_cannot_be_pruned_is_said_at_once():
    with pytest.raises(fitkit.ConfigurationError, match="trial=3 must be"):
        OptunaPruning(3)
    several = optuna.create_study(directions=["minimize", "maximize"]).ask()
    with pytest.raises(fitkit.ConfigurationError, match="several objectives"):
        OptunaPruning(several)
    with pytest.raises(fitkit.ConfigurationError, match="monitors 'val_los'"):
        fit(OptunaPruning(Told(9), "val_los"))
