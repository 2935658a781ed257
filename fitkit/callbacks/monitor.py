"""Monitoring: a value in the epoch's logs that a callback watches, and which is better."""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from contextlib import AbstractContextManager
from typing import Any

from fitkit.arguments import check_choice, check_number, describe
from fitkit.callbacks.base import Callback, from_rank_zero, overrides, run_of
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.fit_state import Run
from fitkit.module import Module
from fitkit.registry import did_you_mean, nearest

WORDS = {
    "min": "loss losses error err mse mae rmse mape smape msle rmsle crossentropy entropy "
    "perplexity hinge distance divergence kld kl nll bce deviance brier wer cer ter mer eer fid "
    "kid lpips regret",
    "max": "accuracy acc auc auroc auprc roc precision recall sensitivity specificity f1 f1score "
    "fbeta fscore r2 r2score iou miou jaccard dice kappa mcc matthews map ap ndcg mrr bleu rouge "
    "meteor chrf psnr ssim pearson spearman kendall correlation similarity match variance score "
    "concordance reward",
}
DIRECTIONS = {word: mode for mode, words in WORDS.items() for word in words.split()}
"""Words in names, and which of their values are better."""


class Monitor:
    """A monitored value. The callback that has it passes itself to the methods.

    Args:
        name: its name in the epoch's logs. `x` also finds `x_epoch`, which is `self.log`'s name for
            a value logged both by step and by epoch.
        mode: `"min"`, `"max"`, or `"auto"`, which infers it from the name.
        min_delta: the difference above which a value is better than another, at least 0.

    Attributes:
        mode: `"min"` or `"max"`.
        worst: a value that any finite one is better than.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid, or the name doesn't say
            which direction is better.
    """

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"monitor={describe(name)} must be the name of a log, like 'val_loss'."
            )
        mode = check_choice("mode", mode, ("auto", "min", "max"))
        min_delta = check_number("min_delta", min_delta, minimum=0)
        self.name = name
        self.mode: str = direction_of(name) if mode == "auto" else mode
        self.min_delta: float = float(min_delta)
        self.worst: float = math.inf if self.mode == "min" else -math.inf
        self._was_there = False

    def begin(self, callback: Callback) -> None:
        """Begin a fit. Tell the run, which warns once, if the value can't come."""
        self._was_there = False
        run = run_of(callback.model)
        why = why_none(self.name, callback.model, callback.params)
        if why is None and not self._may_be_logged(callback, run):
            names = ", ".join(callback.model.metrics_names)
            why = (
                f"no metric or callback gives it: the logs will have {names}."
                f"{did_you_mean(self.name.removeprefix('val_'), callback.model.metrics_names)} If "
                f"nothing logs {self.name!r}, fit ends with an error after its first epoch."
            )
        if run is not None and why is not None:
            run.doubts.append(f"{type(callback).__name__} monitors {self.name!r}, but {why}")

    def _may_be_logged(self, callback: Callback, run: Run | None) -> bool:
        """Whether something may log the value, as far as is known before the first batch."""
        model, own = callback.model, self.name.removeprefix("val_")
        known = [*model.metrics_names, "learning_rate"]
        # Of an output, a class, or a step.
        is_variant = any(own.endswith(f"_{name}") or own.startswith(f"{name}_") for name in known)
        if run is None or own in known or is_variant or _has_own_steps(model):
            return True
        if model._fitkit.compilation.metrics.wait_for_outputs:
            return True
        others = [
            one
            for one in run.callbacks
            if isinstance(one, Callback) and one is not callback and not one.comes_last
        ]
        return any(
            overrides(one, hook) and not isinstance(getattr(one, "_monitored", None), Monitor)
            for one in others
            for hook in ("on_epoch_end", "on_test_end", "on_train_batch_end")
        )

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better by more than `min_delta`. NaN never is."""
        if self.mode == "min":
            return value < than - self.min_delta
        return value > than + self.min_delta

    def read(self, callback: Callback, logs: dict[str, Any]) -> float | None:
        """Return the value in an epoch's logs; None if the epoch doesn't have it.

        Also None if the callback has seen it in a validation within the epoch: each counts once.

        Raises:
            ConfigurationError: the value isn't one number, or it is missing in the first epoch
                that should have it.

        Ranks:
            Collective: rank 0's value counts.
        """
        if self.is_seen(callback):
            return None
        name = type(callback).__name__
        found = logs.get(self.name, logs.get(f"{self.name}_epoch"))
        value, there = from_rank_zero(callback.model, (_number(found), list(logs)))
        if value is not None:
            self._was_there = True
            return value
        if found is not None:
            raise ConfigurationError(
                f"{name} monitors {self.name!r}, which is a {type(found).__name__}, not a number."
            )
        if self._was_there or not self._is_due(callback.model.current_epoch, callback.params):
            return None
        raise ConfigurationError(
            f"{name} monitors {self.name!r}, but the logs have {', '.join(there)}."
            f"{did_you_mean(self.name, there)} Values that another callback adds are visible only "
            "to callbacks after it in the list.",
            code="FK030",
        )

    def read_within(self, callback: Callback, logs: dict[str, Any]) -> float | None:
        """Return the value of a validation within an epoch; None if the validation doesn't have
        it.
        """
        has_it = self.name in logs or f"{self.name}_epoch" in logs
        return self.read(callback, logs) if has_it else None

    def weights(self, callback: Callback) -> AbstractContextManager[Any]:
        """Give the model the weights that have the value, for the length of a block.

        They are those of a validation for its values, and those in the model for others.

        Ranks:
            Collective.
        """
        run = run_of(callback.model)
        if run is None:
            return contextlib.nullcontext()
        prefixes = tuple(prefix for prefix, _ in callback.params.get("evaluations", ()))
        names = {self.name, f"{self.name}_epoch"}
        is_evaluated = names & run.validated_names or (prefixes and self.name.startswith(prefixes))
        return run.as_validated() if is_evaluated else contextlib.nullcontext()

    def is_seen(self, callback: Callback) -> bool:
        """Whether the callback has seen the epoch's value in a validation within the epoch."""
        looks_within = overrides(callback, "on_validation_within_epoch")
        run = run_of(callback.model) if looks_within else None
        seen = {} if run is None else run.seen_values
        return self.name in seen or f"{self.name}_epoch" in seen

    def _is_due(self, epoch: int, params: dict[str, Any]) -> bool:
        """Whether an epoch should have the value: not all of them end with an evaluation."""
        evaluations = params.get("evaluations", ())
        if params.get("validation") is not False:
            evaluations = [("val_", params.get("validation_freq", 1)), *evaluations]
        return all(
            is_due(every, epoch) for prefix, every in evaluations if self.name.startswith(prefix)
        )


def _has_own_steps(model: Module) -> bool:
    """Whether the model's own code may log values."""
    is_subclass = type(model).__module__.partition(".")[0] != "fitkit"
    return is_subclass or type(model).training_step is not Module.training_step


def why_none(name: str, model: Module, params: dict[str, Any]) -> str | None:
    """Why no epoch of a fit has a validation's value, in words; None if one may have it.

    Args:
        name: the value's name.
        model: the model.
        params: the run's, as callbacks have them.
    """
    own, evaluations = name.removeprefix("val_"), list(params.get("evaluations", ()))
    is_evaluated = any(name.startswith(prefix) for prefix, _ in evaluations)
    if params.get("validation") is not False:
        evaluations.append(("val_", params.get("validation_freq", 1)))
    elif own != name and not is_evaluated and own in model.metrics_names:
        # Other names with val_ may be a callback's own.
        return (
            "fit has no validation data. Give fit validation_data or validation_split, or write "
            f"monitor={own!r}. If no callback before it logs {name!r}, fit ends with an error "
            "after its first epoch."
        )
    sets = params.get("validation_sets") or []
    if sets and not is_evaluated and own in model.metrics_names:
        there = ", ".join(f"val_{name}_{own}" for name in sets)
        return (
            f"validation_data has several sets, so the logs have {there}. Write monitor="
            f"'val_{sets[0]}_{own}'. If no callback before it logs {name!r}, fit ends with an "
            "error after its first epoch."
        )
    first, end = params.get("initial_epoch") or 0, params.get("epochs") or 0
    for prefix, every in evaluations:
        if name.startswith(prefix) and first < end and not _is_due_within(every, first, end):
            what = "validation_freq" if prefix == "val_" else "every"
            return (
                f"no epoch up to {end} has it: {what}={every}. Nothing will be compared, saved or "
                f"stopped by it. Write a smaller {what}, or more epochs."
            )
    return None


def _is_due_within(every: Any, first: int, end: int) -> bool:
    """Whether one of the epochs from `first` to before `end` ends with an evaluation."""
    if isinstance(every, (list, tuple, set)):
        return any(first < number <= end for number in every)
    return not isinstance(every, numbers.Integral) or end // int(every) > first // int(every)


def is_due(every: Any, epoch: int) -> bool:
    """Whether epoch `epoch` (from 0) ends with an evaluation.

    Args:
        every: a number of epochs, or a list of epoch numbers (from 1). Other values mean within
            epochs.
    """
    if isinstance(every, (list, tuple, set)):
        return epoch + 1 in every
    return not isinstance(every, numbers.Integral) or (epoch + 1) % int(every) == 0


def direction_of(name: str) -> str:
    """`"min"` or `"max"`, by the last word in a name that says which is better.

    Raises:
        ConfigurationError: no word does.
    """
    words = re.findall("[a-z0-9]+", name.lower())
    for word in reversed(words):
        if word in DIRECTIONS:
            return DIRECTIONS[word]
    suggestion = ""
    for word in words:
        if close := nearest(word, DIRECTIONS):
            suggestion = f" Did you mean {name.lower().replace(word, close[0])!r}?"
    raise ConfigurationError(
        f"mode='auto' can't tell from monitor={name!r} whether lower or higher is better."
        f"{suggestion} Write mode='min' or mode='max'."
    )


def _number(value: Any) -> float | None:
    """Return a value as a float; None if it isn't one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
