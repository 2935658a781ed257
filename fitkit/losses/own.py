"""The loss that a net computes itself, and which labels it is the mean of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fitkit.errors import ConfigurationError, warn
from fitkit.losses.loss import Count, Loss, is_labels
from fitkit.outputs import IGNORED, LossHint


class NetLoss(Loss):
    """The loss that the net computes itself, as Hugging Face models given labels do."""

    takes_whole = True
    may_be_nan = True

    def __init__(self) -> None:
        self.name: str = "loss"
        self.label: str = "The net's own loss"
        self.hint: LossHint = LossHint()
        self.rule: str | None = None
        self.is_decided: bool = False
        self._is_unclear = False  # decided, although nothing showed the rule
        self._has_warned = False

    def __call__(self, prediction: Any, target: Any = None) -> torch.Tensor:
        value = _required(prediction)
        return value.mean() if value.ndim else value

    def may_count(self, targets: list[Any] | None) -> bool:
        return True

    def count(self, prediction: Any, target: Any, classes: int | None = None) -> Count:
        if not is_labels(target):
            return None
        if not self.is_decided:
            self._decide(prediction, target)
        if self.rule is None:
            return None if self.is_decided else (target != IGNORED).sum()
        labels = target[:, 1:] if self.rule == "shifted" else target
        return (labels != IGNORED).sum()

    def agree(self, collectives: Any) -> None:
        """Use the same labels for the count on every rank, even if a rank's first batch has none.

        Ranks:
            Collective.
        """
        gathered = collectives.gather((self.is_decided, self.rule))
        decided = [rule for is_decided, rule in gathered if is_decided]
        if decided:
            self.take(decided[0] if len(set(decided)) == 1 else None)

    def take(self, rule: str | None) -> None:
        """Use a rule for which labels count; None where the mean is over samples."""
        self.rule, self.is_decided = rule, True
        if rule is not None:
            self.hint = LossHint("logits", "classes", -1, is_shifted=rule == "shifted")

    def _decide(self, prediction: Any, target: torch.Tensor) -> None:
        """Find out which labels the net's loss is the mean of, from a batch with labels."""
        ignored = target == IGNORED
        if bool(ignored.all()):
            return  # no loss was computed of any label yet
        from fitkit.extras.own_loss import labels_rule

        self.take(labels_rule(prediction, target))
        self._is_unclear = self.rule is None
        self.check_labels(target, None)

    def checks_each(self, classes: int | None) -> bool:
        return self.rule is None

    def check_labels(self, target: Any, classes: int | None) -> None:
        """Warn, once, of labels that don't count in a mean over nobody knows what."""
        if not self._is_unclear or self._has_warned or not is_labels(target):
            return
        if bool((target == IGNORED).any()):
            self._has_warned = True
            warn(
                "Labels of -100 don't count in the net's own loss, and fitkit can't tell what "
                "its mean is taken over. It weights batches by their samples, so the result "
                "depends on how they are cut. Return logits beside the loss, give compile a loss, "
                "or return {'loss': loss, 'count': labels that count} from a training_step."
            )

    def per_sample(self, prediction: Any, target: Any = None) -> torch.Tensor:
        value = _required(prediction)
        if value.ndim == 0:
            raise ConfigurationError(
                "The net computes its own loss, one number for the whole batch, so sample and "
                "class weights can't reach it. Give compile a loss, or leave the weights out."
            )
        return value

    def check(self, prediction: Any, target: Any = None) -> None:
        _required(prediction)
        if is_labels(target) and not self.is_decided:
            self._decide(prediction, target)


def carried(prediction: Any) -> torch.Tensor | None:
    """Return the loss in a net's output: its attribute `loss`, or its key."""
    if isinstance(prediction, Mapping):
        value = prediction.get("loss")
    else:
        value = getattr(prediction, "loss", None)
    return value if isinstance(value, torch.Tensor) else None


def _required(prediction: Any) -> torch.Tensor:
    """Return the loss in a net's output.

    Raises:
        ConfigurationError: it has none.
    """
    value = carried(prediction)
    if value is None:
        from fitkit.extras.own_loss import carries_none

        raise carries_none(prediction)
    return value
