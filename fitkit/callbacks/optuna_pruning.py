"""Ending trials of an Optuna study that won't become good ones."""

from __future__ import annotations

from typing import Any

from fitkit.arguments import describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.monitor import Monitor
from fitkit.callbacks.ranks import from_rank_zero
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package


class OptunaPruning(Callback):
    """Tells an Optuna trial each epoch's value, and ends the trial where its pruner says so.

    `fit` raises `optuna.TrialPruned` then, which the study expects. Epochs without the value
    (validation_freq) tell nothing. Steps are epochs, from 0.

    Args:
        trial: what the study passes to the objective.
        monitor: a name of the epoch's logs. Default `"val_loss"`. Whether lower or higher is
            better is the study's direction.

    Raises:
        ArgumentTypeError: no trial, or no name.
        ConfigurationError: a study of several objectives, which Optuna can't prune; at the end of
            the first epoch that should have it, a name that the logs don't have.

    Ranks:
        The trial stays with rank 0, which asks; all ranks end alike. Under `strategy="ddp"` each
        rank runs the whole script, with a study of its own: use `ddp_spawn` (which `"auto"` is).
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
                "Optuna can't prune trials of a study of several objectives. Leave OptunaPruning "
                "out, or give the study one direction."
            )
        self.trial = trial
        self.monitor = monitor
        self._watch = Monitor(monitor, "min", callback=type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """All but the trial, which holds a connection to the study's storage."""
        return {**super().__getstate__(), "trial": None}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._watch.begin(self.model, self.params)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        value = self._watch.read(self.model, self.params, logs)
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
    """The error that tells a study of a pruned trial."""
    try:
        import optuna
    except ImportError:
        raise missing_package("optuna", "optuna", "OptunaPruning") from None
    error: Exception = optuna.TrialPruned(message)
    return error
