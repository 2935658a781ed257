"""The loss that a net computes itself, and which labels it is the mean of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from fitkit.accelerators import widest_dtype
from fitkit.arguments import describe
from fitkit.errors import ConfigurationError, warn
from fitkit.losses.loss import Count, Loss, is_labels
from fitkit.losses.sums import sums_over_samples
from fitkit.outputs import IGNORED, SINGLE, LossHint, named_outputs


class OwnLoss(Loss):
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

    def decide_by_sum(self, mean: Any, summed: Any, target: Any) -> None:
        """Find out which labels the net's loss is the mean of, from the same batch's sum.

        Args:
            mean: the net's loss for a batch.
            summed: its loss for the batch with `num_items_in_batch=1`.
            target: the batch's labels.
        """
        own, total = _carried(mean), _carried(summed)
        if own is None or total is None or not is_labels(target) or not float(own):
            return
        found = float(total) / float(own)
        counts = {"aligned": int((target != IGNORED).sum())}
        if target.ndim == 2:
            counts["shifted"] = int((target[:, 1:] != IGNORED).sum())
        rule = min(counts, key=lambda name: abs(counts[name] - found))
        is_clear = len(set(counts.values())) == len(counts)
        if is_clear and abs(counts[rule] - found) < 0.25:  # labels are whole
            self._take(rule)

    def telling_rows(self, prediction: Any, target: Any) -> tuple[int, int] | None:
        """Two rows of a first batch, with different numbers of labels that count.

        None where the net's loss and logits tell what counts, or where there are no such rows.
        """
        if not is_labels(target) or target.ndim != 2 or self.is_decided:
            return None
        counts = (target != IGNORED).sum(1)
        counts = torch.where(counts == 0, target.shape[1] + 1, counts).tolist()
        few, many = min(counts), max([c for c in counts if c <= target.shape[1]], default=0)
        if few >= many or labels_rule(prediction, target) is not None:
            return None
        return counts.index(few), counts.index(many)

    def decide_by_rows(self, *asked: tuple[torch.Tensor, Any], is_part: bool) -> None:
        """Find out from two samples, alone and together, whether the net's loss is their mean.

        Args:
            asked: the labels and the net's output for the one, the other, and both.
            is_part: whether batches are parts of an update.

        Raises:
            ConfigurationError: the loss is their sum, and batches are parts.
        """
        losses = [_carried(output) for _, output in asked]
        if any(loss is None or loss.ndim for loss in losses):
            return
        one, other, both = (float(loss) for loss in losses if loss is not None)
        few, many, _ = (int((labels != IGNORED).sum()) for labels, _ in asked)
        ways = {
            "samples": (one + other) / 2,
            "labels": (few * one + many * other) / (few + many),
            "sum": one + other,
        }
        fitting = [way for way, value in ways.items() if math.isclose(value, both, rel_tol=1e-4)]
        if fitting == ["sum"] and is_part:
            raise ConfigurationError(sums_over_samples(self.label), code="FK061")
        if fitting in (["samples"], ["sum"]):
            self._take(None)

    def agree(self, collectives: Any) -> None:
        """Use the same labels for the count on every rank, even if a rank's first batch has none.

        Ranks:
            Collective.
        """
        gathered = collectives.gather((self.is_decided, self.rule))
        decided = [rule for is_decided, rule in gathered if is_decided]
        if decided:
            self._take(decided[0] if len(set(decided)) == 1 else None)

    def _take(self, rule: str | None) -> None:
        self.rule, self.is_decided = rule, True
        if rule is not None:
            self.hint = LossHint("logits", "classes", -1, is_shifted=rule == "shifted")

    def _decide(self, prediction: Any, target: torch.Tensor) -> None:
        """Find out which labels the net's loss is the mean of, from a batch with labels."""
        ignored = target == IGNORED
        if bool(ignored.all()):
            return  # no loss was computed of any label yet
        self._take(labels_rule(prediction, target))
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


MOST_SCORES = 2**24
"""The most logits to copy at once: those of a batch may take gigabytes."""


@torch.no_grad()
def labels_rule(prediction: Any, target: Any) -> str | None:
    """Which label each of a net's logits predicts, found from the loss that the net computed.

    The cross entropy of the logits is computed in both ways and compared with the net's loss. Both
    may fit (while all logits are equal), or neither (with an auxiliary loss). Then an output whose
    class name contains `CausalLM`, as Hugging Face's do, is taken as shifted.

    Args:
        prediction: the net's output, with its loss and its logits, (N, C) or (N, T, C).
        target: the labels, (N,) or (N, T); -100 for no label.

    Returns:
        `"shifted"`: logits[:, t] predict labels[:, t + 1], and the last predict none. `"aligned"`:
        each predicts the label in its own place. None: unclear.
    """
    loss, logits = _carried(prediction), named_outputs(prediction).get(SINGLE)
    if loss is None or not isinstance(logits, torch.Tensor) or not is_labels(target):
        return None
    if logits.ndim not in (2, 3) or target.shape != logits.shape[:-1]:
        return None
    by_class = "shifted" if logits.ndim == 3 and "CausalLM" in type(prediction).__name__ else None
    counted = target[target != IGNORED]
    if not counted.numel() or counted.min() < 0 or counted.max() >= logits.shape[-1]:
        return by_class
    if logits.ndim == 2:  # N places of one sample
        ways = {"aligned": _cross_entropy(logits.unsqueeze(0), target.unsqueeze(0), 0)}
    else:
        ways = {way: _cross_entropy(logits, target, n) for n, way in enumerate(LABELS_RULES)}
    value = loss.to(widest_dtype(loss.device)).mean().item()
    # A value that bfloat16 can hold was rounded by up to 4e-3 before predictions were widened.
    tolerance = 1e-2 if bool((loss == loss.bfloat16()).all()) else 1e-3
    away = {way: abs(found - value) for way, found in ways.items()}
    fitting = [way for way in away if away[way] <= tolerance * abs(value)]
    if len(fitting) == 1:
        return fitting[0]
    if by_class is None and len(fitting) == 2:
        near, far = sorted(fitting, key=away.__getitem__)
        return near if 10 * away[near] < away[far] else None
    return by_class


LABELS_RULES = ("aligned", "shifted")
"""The results of `labels_rule`, and the distance from a logit to its label in places."""


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> float:
    """Return the mean over all labels that count: of logits (N, T, C), for labels (N, T) `shift`
    later.
    """
    logits, labels = logits[:, : logits.shape[1] - shift], labels[:, shift:].long()
    rows = max(1, MOST_SCORES // max(1, logits[0].numel()))
    sums = [
        F.cross_entropy(some.float().flatten(0, 1), theirs.flatten(), reduction="sum").item()
        for some, theirs in zip(logits.split(rows), labels.split(rows), strict=True)
    ]
    return sum(sums) / max(1, int((labels != IGNORED).sum()))


def _carried(prediction: Any) -> torch.Tensor | None:
    """Return the loss in a net's output: its attribute `loss`, or its key."""
    if isinstance(prediction, Mapping):
        value = prediction.get("loss")
    else:
        value = getattr(prediction, "loss", None)
    return value if isinstance(value, torch.Tensor) else None


def _as_returned(prediction: Any) -> str:
    """Return what to write for a net that returns its loss, or several of them."""
    if isinstance(prediction, torch.Tensor) and prediction.ndim == 0:
        return " If this is the loss itself, write loss=lambda output, target: output."
    entries = list(prediction.values()) if isinstance(prediction, Mapping) else []
    if entries and all(isinstance(one, torch.Tensor) and one.ndim == 0 for one in entries):
        return (
            " If these are losses, write a training_step: self.log_dict(losses); return "
            "sum(losses.values())."
        )
    return ""


def _required(prediction: Any) -> torch.Tensor:
    """Return the loss in a net's output.

    Raises:
        ConfigurationError: it has none.
    """
    value = _carried(prediction)
    if value is not None:
        return value
    if isinstance(prediction, Mapping):
        output = f"{type(prediction).__name__} with the keys {list(prediction)}"
    else:
        is_tensor = isinstance(prediction, torch.Tensor)
        output = describe(prediction) if is_tensor else type(prediction).__name__
    raise ConfigurationError(
        f"compile was given no loss, or wasn't called, and the net's output ({output}) carries "
        "none. Give compile a loss before fit, like model.compile('adam', "
        "loss='cross_entropy'). "
        "Or let the net return an object with .loss (Hugging Face models do if the batch has "
        "labels) or a dict with 'loss'. Or define training_step, validation_step and "
        f"test_step in a subclass.{_as_returned(prediction)}",
        code="FK015",
    )
