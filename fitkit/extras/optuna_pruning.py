"""Pruning of an Optuna trial."""

from __future__ import annotations

from typing import Any

from fitkit.arguments import describe
from fitkit.callbacks.base import Callback, Logs, from_rank_zero
from fitkit.callbacks.monitor import Monitor
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package


class OptunaPruning(Callback):
    """Reports each epoch's value to an Optuna trial, and ends the trial if its pruner says so.

    `fit` then raises `optuna.TrialPruned`, which the study expects. Epochs without the value
    (`validation_freq`) report nothing. Optuna's steps are epochs, from 0.

    Args:
        trial: the trial that the study passes to the objective.
        monitor: the name of a value in the epoch's logs. Default `"val_loss"`. The study's
            direction says whether lower or higher is better.

    Example:
        >>> import torch, fitkit
        >>> def objective(trial):
        ...     model = fitkit.Model(torch.nn.Linear(4, 1))
        ...     model.compile("adam", "mse", learning_rate=trial.suggest_float("rate", 1e-4, 1e-1))
        ...     x = torch.randn(64, 4)
        ...     pruning = fitkit.callbacks.OptunaPruning(trial, "loss")
        ...     return model.fit(x, x.sum(1), verbose=0, callbacks=[pruning]).history["loss"][-1]

    Raises:
        ArgumentTypeError: `trial` isn't a trial, or `monitor` isn't a name.
        ConfigurationError: the study has several objectives, which Optuna can't prune. Also at the
            end of the first epoch that should have the value, if the logs don't have it.

    Ranks:
        The trial stays on rank 0, which asks the pruner. All ranks end together. Under
        `strategy="ddp"` each rank runs the whole script with its own study. Use `ddp_spawn`
        instead, which is the default.
    """

    stops_alike = True

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        if not (hasattr(trial, "report") and hasattr(trial, "should_prune")):
            raise ArgumentTypeError(
                f"trial={describe(trial)} must be the trial that Optuna passes to the objective."
            )
        study = getattr(trial, "study", None)
        if len(getattr(study, "directions", ())) > 1:
            raise ConfigurationError(
                "Optuna can't prune trials of a study with several objectives. Leave out "
                "OptunaPruning, or give the study one direction."
            )
        self.trial = trial
        self.monitor = monitor
        self._monitored = Monitor(monitor, "min")

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        """All but the trial, which holds a connection to the study's storage."""
        return {**super()._state_for_ranks(strategy), "trial": None}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._monitored.begin(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        value = self._monitored.read(self, logs)
        if value is None:
            return
        if from_rank_zero(self.model, self._ends(epoch, value)):
            raise _pruned(f"Trial pruned after epoch {epoch + 1}: {self.monitor} is {value:g}.")

    def _ends(self, epoch: int, value: float) -> bool:
        """Whether the pruner ends the trial; False on other ranks."""
        if self.trial is None or not self.model.is_global_zero:
            return False
        self.trial.report(value, epoch)
        return bool(self.trial.should_prune())


def _pruned(message: str) -> Exception:
    """Return the exception by which a study recognizes a pruned trial."""
    try:
        import optuna
    except ImportError:
        raise missing_package("optuna", "optuna", "OptunaPruning") from None
    error: Exception = optuna.TrialPruned(message)
    return error
