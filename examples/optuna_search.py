"""Optuna looks for a learning rate and a width, and ends bad trials early.

    python examples/optuna_search.py                # about 20 seconds
    python examples/optuna_search.py --trials 40    # a longer search

The 1,797 images of digits come with scikit-learn. Each epoch's validation loss is told to Optuna,
whose pruner compares it with the earlier trials' at the same epoch.

    pip install 'torch-fitkit[optuna]'

The exit status is 1 where no trial was pruned, or the best one tells fewer than 9 of 10 digits.
"""

from __future__ import annotations

import argparse
import sys

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

import fitkit
from fitkit.callbacks import OptunaPruning

EPOCHS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description="A search with pruned trials.")
    parser.add_argument("--trials", type=int, default=15, help="how many trials (15)")
    trials = parser.parse_args().trials
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16  # (N, 64)
    y = torch.tensor(digits.target)

    def objective(trial: optuna.Trial) -> float:
        fitkit.set_seed(0)
        width = trial.suggest_int("width", 8, 128, log=True)
        model = fitkit.Model(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)))
        model.compile(
            "adam",
            "cross_entropy",
            metrics=["accuracy"],
            learning_rate=trial.suggest_float("learning_rate", 1e-5, 0.3, log=True),
        )
        history = model.fit(
            x,
            y,
            epochs=EPOCHS,
            validation_split=0.25,
            verbose=0,
            callbacks=OptunaPruning(trial),
        ).history
        trial.set_user_attr("accuracy", history["val_accuracy"][-1])
        return float(history["val_loss"][-1])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
    )
    study.optimize(objective, n_trials=trials)
    pruned = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.PRUNED]
    epochs = [len(trial.intermediate_values) for trial in pruned]
    print(f"{len(pruned)} of {trials} trials were pruned, after {sum(epochs)} epochs in all")
    best = study.best_trial
    print(f"best: width {best.params['width']}, rate {best.params['learning_rate']:.4f}")
    accuracy = best.user_attrs["accuracy"]
    print(f"its accuracy on held-out digits: {100 * accuracy:.1f}%")
    return int(not pruned or accuracy < 0.9)


if __name__ == "__main__":
    sys.exit(main())
