"""What a net's own loss is the mean over, as a first batch shows or the net when asked again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from fitkit import trees
from fitkit.accelerators import widest_dtype
from fitkit.arguments import describe
from fitkit.errors import ConfigurationError
from fitkit.extras.summing_losses import sums_over_samples
from fitkit.outputs import IGNORED, SINGLE, is_hugging_face, named_outputs
from fitkit.seams.losses import NetLoss, carried, is_labels
from fitkit.typing import Tree

ITEMS = "num_items_in_batch"
"""What Hugging Face's nets divide the sum of their loss by, if they are given it."""


class TakesInputs(Protocol):
    """Says which inputs a net takes (`step.Caller`)."""

    def takes(self, x: Tree, name: str) -> bool:
        """Whether an input of this name may be among those passed by keyword."""

    def takes_any_keyword(self, x: Tree) -> bool:
        """Whether inputs of any name may be among them."""


def ask(
    own: NetLoss,
    net: nn.Module,
    caller: TakesInputs,
    computed: Callable[[Any], Any],
    prediction: Tree,
    x: Mapping[str, Any],
    y: Any,
    *,
    is_part: bool,
    asks_rows: bool,
) -> None:
    """Find out what counts by asking the net in other ways.

    Args:
        own: gets what was found.
        net, caller: what computes the loss, and how it takes inputs.
        computed: calls the net, in evaluation mode and without gradients.
        prediction: the net's output for the batch.
        x, y: the batch's inputs, and its labels.
        is_part: whether batches are parts of an update.
        asks_rows: whether the net may be called for some rows of the batch.

    Raises:
        ConfigurationError: the loss is the samples' sum, and batches are parts.
    """
    if takes_items_in_batch(net, caller, x):
        with contextlib.suppress(TypeError):  # where it is passed on, nobody may take it
            rule = rule_by_sum(computed(x), computed({**x, ITEMS: 1}), y)
            if rule is not None:
                own.take(rule)
    if asks_rows and not own.is_decided:
        _ask_for_rows(own, computed, prediction, x, y, is_part=is_part)


def takes_items_in_batch(net: nn.Module, caller: TakesInputs, x: Tree) -> bool:
    """Whether a net may give its loss's sum: by its signature, or by one of Hugging Face's in it,
    to which it passes on any keyword."""
    if caller.takes(x, ITEMS):
        return True
    return caller.takes_any_keyword(x) and any(map(is_hugging_face, net.modules()))


def rule_by_sum(mean: Any, summed: Any, target: Any) -> str | None:
    """Which labels a net's loss is the mean of, from the same batch's sum; None where unclear.

    Args:
        mean: the net's output for a batch.
        summed: its output for the batch with `num_items_in_batch=1`.
        target: the batch's labels.
    """
    own, total = carried(mean), carried(summed)
    if own is None or total is None or not is_labels(target) or not float(own):
        return None
    found = float(total) / float(own)
    counts = {"aligned": int((target != IGNORED).sum())}
    if target.ndim == 2:
        counts["shifted"] = int((target[:, 1:] != IGNORED).sum())
    rule = min(counts, key=lambda name: abs(counts[name] - found))
    is_clear = len(set(counts.values())) == len(counts)
    return rule if is_clear and abs(counts[rule] - found) < 0.25 else None  # labels are whole


def _ask_for_rows(
    own: NetLoss,
    computed: Callable[[Any], Any],
    prediction: Tree,
    x: Mapping[str, Any],
    y: Any,
    *,
    is_part: bool,
) -> None:
    """Find out from two samples, alone and together, whether the net's loss is their mean."""
    pair = telling_rows(prediction, y)
    if pair is None:
        return

    def asked(*rows: int) -> tuple[int, torch.Tensor | None]:
        """Return how many labels count in some rows, and the net's loss for them."""

        def some(leaf: object) -> object:
            if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == len(y):
                return leaf[list(rows)]
            return leaf

        count = int((y[list(rows)] != IGNORED).sum())
        return count, carried(computed(trees.map_leaves(some, x)))

    (few, one), (many, other), (_, both) = asked(pair[0]), asked(pair[1]), asked(*pair)
    if one is None or other is None or both is None or one.ndim or other.ndim or both.ndim:
        return
    ways = {
        "samples": (float(one) + float(other)) / 2,
        "labels": (few * float(one) + many * float(other)) / (few + many),
        "sum": float(one) + float(other),
    }
    loss = float(both)
    fitting = [way for way, value in ways.items() if math.isclose(value, loss, rel_tol=1e-4)]
    if fitting == ["sum"] and is_part:
        raise ConfigurationError(sums_over_samples(own.label), code="FK061")
    if fitting in (["samples"], ["sum"]):
        own.take(None)


def telling_rows(prediction: Any, target: Any) -> tuple[int, int] | None:
    """Two rows of a first batch, with different numbers of labels that count.

    None where the net's loss and logits tell what counts, or where there are no such rows.
    """
    if not is_labels(target) or target.ndim != 2:
        return None
    counts = (target != IGNORED).sum(1)
    counts = torch.where(counts == 0, target.shape[1] + 1, counts).tolist()
    few, many = min(counts), max([c for c in counts if c <= target.shape[1]], default=0)
    if few >= many or labels_rule(prediction, target) is not None:
        return None
    return counts.index(few), counts.index(many)


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
    loss, logits = carried(prediction), named_outputs(prediction).get(SINGLE)
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


def carries_none(prediction: Any) -> ConfigurationError:
    """Return the error for a net that must compute its loss, and gives none."""
    if isinstance(prediction, Mapping):
        output = f"{type(prediction).__name__} with the keys {list(prediction)}"
    else:
        is_tensor = isinstance(prediction, torch.Tensor)
        output = describe(prediction) if is_tensor else type(prediction).__name__
    return ConfigurationError(
        f"compile was given no loss, or wasn't called, and the net's output ({output}) carries "
        "none. Give compile a loss before fit, like model.compile('adam', "
        "loss='cross_entropy'). "
        "Or let the net return an object with .loss (Hugging Face models do if the batch has "
        "labels) or a dict with 'loss'. Or define training_step, validation_step and "
        f"test_step in a subclass.{_as_returned(prediction)}",
        code="FK015",
    )


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
