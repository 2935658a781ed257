"""What fitkit knows about a loss: how to compute it, what it reads and what may go wrong."""

from __future__ import annotations

import dataclasses

from fitkit.losses.functions import CountedLabels, LossFunction
from fitkit.losses.targets import Match
from fitkit.outputs import LossHint


@dataclasses.dataclass(frozen=True)
class Definition:
    """A loss whose meaning fitkit knows.

    Attributes:
        mean: `(prediction, target)`, matched, to the mean over the batch.
        each: the same to values of shape (N, ...), whose mean over all is `mean`.
        match: how the target is brought to the prediction, from `targets.py`.
        hint: what the loss tells about predictions and task.
        twin: the loss for a net that gives the other form: of one that takes probabilities, the
            one that takes logits, and the other way round. None where there is none.
        rows_sum_to_one: predictions are probabilities of classes, which must sum to 1.
        shares: targets of the predictions' shape are one-hot, or classes' shares that sum to 1.
        clips: slightly wrong probabilities are clipped, rather than refused by torch.
        signs: labels are -1 and 1.
        ignore_index: a label that isn't a class and doesn't count, where the loss has one.
        counted: what the mean over class indices divides by, where that isn't their number.
        joins: whether a sample's value depends on that sample alone, so that several batches may be
            computed as one.
    """

    mean: LossFunction
    each: LossFunction
    match: Match
    hint: LossHint
    twin: str | None = None
    rows_sum_to_one: bool = False
    shares: bool = False
    clips: bool = False
    signs: bool = False
    ignore_index: int | None = None
    counted: CountedLabels | None = None
    joins: bool = True
