"""A value of the epoch's logs that a callback watches, and which of two values is better."""

from __future__ import annotations

import math
import re
from typing import Any

from fitkit import trees
from fitkit.arguments import check_choice, check_number, describe
from fitkit.callbacks.ranks import from_rank_zero
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.module import Module
from fitkit.registry import nearest

LOWER = frozenset(
    [
        "loss",
        "losses",
        "error",
        "err",
        "mse",
        "mae",
        "rmse",
        "mape",
        "smape",
        "msle",
        "rmsle",
        "crossentropy",
        "entropy",
        "perplexity",
        "hinge",
        "distance",
        "divergence",
        "kld",
        "kl",
        "nll",
        "bce",
        "deviance",
        "brier",
        "wer",
        "cer",
        "ter",
        "mer",
        "eer",
        "fid",
        "kid",
        "lpips",
        "regret",
    ]
)
"""Words of names whose lower values are better."""

HIGHER = frozenset(
    [
        "accuracy",
        "acc",
        "auc",
        "auroc",
        "auprc",
        "roc",
        "precision",
        "recall",
        "sensitivity",
        "specificity",
        "f1",
        "f1score",
        "fbeta",
        "fscore",
        "r2",
        "r2score",
        "iou",
        "miou",
        "jaccard",
        "dice",
        "kappa",
        "mcc",
        "matthews",
        "map",
        "ap",
        "ndcg",
        "mrr",
        "bleu",
        "rouge",
        "meteor",
        "chrf",
        "psnr",
        "ssim",
        "pearson",
        "spearman",
        "kendall",
        "correlation",
        "similarity",
        "match",
        "variance",
        "score",
        "concordance",
        "reward",
    ]
)
"""Words of names whose higher values are better."""


class Monitor:
    """One watched value.

    Args:
        name: its name in the epoch's logs.
        mode: `"min"`, `"max"`, or `"auto"`: by the name, where it tells.
        min_delta: by how much more than this a value must be better than another, at least 0.
        callback: whose watch it is, for messages.

    Attributes:
        mode: `"min"` or `"max"`.
        worst: what any finite value is better than.

    Raises:
        ArgumentTypeError, ConfigurationError: arguments that can't be, or a name that doesn't
            tell which direction is better.
    """

    def __init__(
        self, name: str, mode: str = "auto", min_delta: float = 0.0, callback: str = ""
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"monitor={describe(name)} must be the name of a log, like 'val_loss'."
            )
        check_choice("mode", mode, ("auto", "min", "max"))
        check_number("min_delta", min_delta, minimum=0)
        self.name = name
        self.mode = direction_of(name) if mode == "auto" else mode
        self.min_delta = float(min_delta)
        self.callback = callback
        self.worst = math.inf if self.mode == "min" else -math.inf
        self._seen = False

    def begin(self, model: Module, params: dict[str, Any]) -> None:
        """A fit begins.

        Raises:
            ConfigurationError: a name that no epoch will have, as far as that is known by now; or
                a value of the validation, and fit has nothing to validate on.
        """
        self._seen = False
        names = _names_to_come(model, params)
        if names and not self._is_one_of(names) and not self._comes_from_a_callback(params):
            raise self._absent(names)
        # Other names with val_ may be a user's own callback's.
        if (
            self.name in [f"val_{name}" for name in model.metrics_names]
            and params.get("validation") is False
            and not self._comes_from_a_callback(params)
        ):
            raise ConfigurationError(
                f"{self.callback} monitors {self.name!r}, but fit has no validation data. Give "
                f"fit validation_data or validation_split, or write "
                f"monitor={self.name.removeprefix('val_')!r}."
            )

    def _is_one_of(self, names: list[str]) -> bool:
        """Whether the name is one of those, or that of one output (`a_loss`, `val_a_loss`)."""
        base = self.name.removeprefix("val_")
        return any(base == name or base.endswith(f"_{name}") for name in names)

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better by more than `min_delta`; NaN never is."""
        if self.mode == "min":
            return value < than - self.min_delta
        return value > than + self.min_delta

    def read(self, model: Module, params: dict[str, Any], logs: dict[str, Any]) -> float | None:
        """The value in an epoch's logs; None in an epoch that doesn't have it.

        Raises:
            ConfigurationError: no epoch will have it, or it isn't one number.

        Ranks:
            Collective: rank 0's value counts.
        """
        found = logs.get(self.name)
        value, names = from_rank_zero(model, (_number(found), list(logs)))
        if value is not None:
            self._seen = True
            return value
        if found is not None:
            raise ConfigurationError(
                f"{self.callback} monitors {self.name!r}, which is a {type(found).__name__}, "
                "not one number."
            )
        if not self._seen and not self._may_come(params, names):
            raise self._absent(names)
        return None

    def _may_come(self, params: dict[str, Any], names: list[str]) -> bool:
        """Whether a later epoch may have the value."""
        for prefix in self._prefixes(params, every_epoch=False):
            # An epoch's other logs with val_ are the validation's.
            if prefix == "val_" or not any(name.startswith(prefix) for name in names):
                return True
        is_validations = self.name.startswith("val_")
        validated = any(name.startswith("val_") for name in names)
        return is_validations and not validated and params.get("validation") is not False

    def _comes_from_a_callback(self, params: dict[str, Any]) -> bool:
        return any(self._prefixes(params))

    def _prefixes(self, params: dict[str, Any], every_epoch: bool | None = None) -> list[str]:
        """The announced prefixes that the name has; of those that come so often, if given."""
        announced = params.get("prefixes", {}).items()
        return [
            prefix
            for prefix, often in announced
            if self.name.startswith(prefix) and every_epoch in (None, often)
        ]

    def _absent(self, names: list[str]) -> ConfigurationError:
        close = nearest(self.name, names)
        suggestion = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        return ConfigurationError(
            f"{self.callback} monitors {self.name!r}, but the logs have {', '.join(names)}."
            f"{suggestion} What another callback adds is there only for those after it in the list."
        )


def _names_to_come(model: Module, params: dict[str, Any]) -> list[str] | None:
    """The logs of the epochs of a net with one output; None where somebody may log others.

    Steps and losses of a user's own may log anything, and a metric that is an object may give
    several values.
    """
    if type(model).__module__ != "fitkit.model" or params.get("unannounced_logs", True):
        return None
    asked = [
        model._fitkit.compilation.given.get(n) for n in ("loss", "metrics", "weighted_metrics")
    ]
    if not all(isinstance(leaf, str) for leaf in trees.leaves(asked) if leaf is not None):
        return None
    names = ["loss", *model._fitkit.compilation.metrics.known_names]
    return names + [f"val_{name}" for name in names] * bool(params.get("validation"))


def announce_prefix(params: dict[str, Any], prefix: str, *, every_epoch: bool = True) -> None:
    """Say that logs which begin so come from a callback, perhaps not every epoch.

    Called in `set_params`: before any callback's first hook.
    """
    announced = params.setdefault("prefixes", {})
    announced[prefix] = announced.get(prefix, True) and every_epoch


def direction_of(name: str) -> str:
    """`"min"` or `"max"`, by the last word of a name that tells.

    Raises:
        ConfigurationError: none does.
    """
    for word in reversed(re.findall("[a-z0-9]+", name.lower())):
        if word in LOWER:
            return "min"
        if word in HIGHER:
            return "max"
    raise ConfigurationError(
        f"mode='auto' can't tell from monitor={name!r} whether lower or higher is better. Write "
        "mode='min' or mode='max'."
    )


def _number(value: Any) -> float | None:
    """A value as a float; None where it isn't one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
