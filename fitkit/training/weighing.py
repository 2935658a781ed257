"""What the parts of an update weigh, so that it is the update of all of them as one batch.

An update's parts are the batches of its group, on all ranks. A part's loss is a mean over what
counts in it: its samples, or for example the labels that aren't ignored. The loss of all parts as
one batch is

    sum of count * value / whole,    where whole = sum of count

The gradients of a rank's parts are added up, and the ranks' sums are averaged. So what enters a
part's backward is `value * count * ranks / whole` (`weighed`).

Often the whole isn't known before the first backward. Then an expected whole stands in its place,
the same on all ranks. At the end the gradients are multiplied by `expected / whole` (`correction`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fitkit.data.batches import Batch
from fitkit.errors import ConfigurationError
from fitkit.losses import Count
from fitkit.training.step import Outcome

Number = float | torch.Tensor
"""A count or a factor: a number, or a tensor () on the device, which isn't read."""

TINY = torch.finfo(torch.float64).tiny


def count_in(batch: Batch, count: Count) -> Number:
    """Return what a loss counts for: what it is the mean over, and nothing in a batch that only
    fills.
    """
    return batch.samples if count is None or not batch.samples else count


def nothing_if(loss: torch.Tensor, count: Number) -> torch.Tensor:
    """Return a part's loss; 0 if it is the mean over nothing, which is NaN."""
    if isinstance(count, torch.Tensor):
        return torch.where(count > 0, loss, 0.0)
    return loss if count else loss.nan_to_num(0.0, 0.0, 0.0)


def weighed(
    value: torch.Tensor, count: Number, ranks: int, whole: float, scale: float = 1.0
) -> torch.Tensor:
    """Return a part's mean as it enters the backward.

    Args:
        value: the mean.
        count: what it is the mean over.
        ranks: how many of them see different data.
        whole: what all parts count for, or what they are expected to.
        scale: a loss weight.
    """
    value = nothing_if(value, count)
    if not isinstance(count, torch.Tensor) and scale == 1.0 and count * ranks == whole:
        return value  # all parts weigh the same, or there is one
    return value * (count * (scale * ranks / max(whole, TINY)))


def correction(expected: float, whole: Number) -> Number | None:
    """Return what gradients are multiplied by whose parts were weighed by an expected whole.

    Returns:
        None if they are right as they are.
    """
    if isinstance(whole, torch.Tensor):
        return torch.where(whole > 0, expected / whole, 1.0)
    return expected / whole if whole not in (0, expected) else None


def about(count: float, samples: int) -> float:
    """Return what a sample counts for, about, from the count of some samples.

    Gradients have about the right size from the start by this. It is a power of 2, which rounds
    nothing. So a resumed training computes the same bits, even with another estimate.
    """
    return 2.0 ** round(math.log2(count / samples)) if count > 0 and samples else 1.0


class Weighing(Protocol):
    """How the parts of one update weigh."""

    def part(self, batch: Batch, outcome: Outcome) -> tuple[torch.Tensor, Number]:
        """Return the loss that enters a part's backward, and what the part counts for."""

    def correction(self, over_ranks: Callable[[Number], Number]) -> Number | None:
        """Return what the gradients are multiplied by once all parts are in; None for nothing.

        Args:
            over_ranks: sums this rank's count over the ranks.
        """

    def anew(self) -> Weighing:
        """Return how the same parts weigh if they are computed again."""


@dataclasses.dataclass
class Late:
    """One mean, of which the whole is known once all parts are in.

    Attributes:
        expected: what all parts may count for.
        ranks: how many of them see different data.
        asks: whether only the ranks together know the whole. Otherwise all parts count their
            samples, and each batch says how many there are on all ranks.
        counted: what the parts so far count for on this rank.
        samples: those of the parts so far, on all ranks.
    """

    expected: float
    ranks: int
    asks: bool
    counted: Number = 0
    samples: int = 0

    def part(self, batch: Batch, outcome: Outcome) -> tuple[torch.Tensor, Number]:
        assert outcome.loss is not None
        count = count_in(batch, outcome.count)
        self.asks = self.asks or outcome.count is not None
        self.counted = self.counted + count
        self.samples += batch.total
        return weighed(outcome.loss, count, self.ranks, self.expected), count

    def correction(self, over_ranks: Callable[[Number], Number]) -> Number | None:
        whole = over_ranks(self.counted) if self.asks else self.samples
        return correction(self.expected, whole)

    def anew(self) -> Late:
        return dataclasses.replace(self, counted=0, samples=0)


@dataclasses.dataclass
class Known:
    """The means of several outputs, of which all wholes are known before the first backward.

    They are means over different things, so no single factor could correct them afterwards.

    Attributes:
        wholes: what each mean counts for in all parts.
        left: what it counts for in this rank's parts to come, by the mean's name.
        ranks: how many of them see different data.
    """

    wholes: Sequence[float]
    left: dict[str, float]
    ranks: int

    def __post_init__(self) -> None:
        self._all = dict(self.left)

    def part(self, batch: Batch, outcome: Outcome) -> tuple[torch.Tensor, Number]:
        values = []
        for term, whole in zip(outcome.terms, self.wholes, strict=True):
            count = count_in(batch, term.count)
            # Reading a tensor may wait.
            left = 0.0 if isinstance(count, torch.Tensor) else self.left[term.name] - count
            self.left[term.name] = left
            values.append(weighed(term.value, count, self.ranks, whole, term.scale))
        return functools.reduce(torch.add, values), 1.0

    def correction(self, over_ranks: Callable[[Number], Number]) -> None:
        if wrong := [name for name, count in self.left.items() if abs(count) > 0.5]:
            raise ConfigurationError(
                f"The loss of {', '.join(wrong)} is a mean over values whose number can't be "
                "known before the forward, but updates of several outputs and batches need it. "
                "Let it return one value per sample, or write accumulate_grad_batches=1."
            )

    def anew(self) -> Known:
        return dataclasses.replace(self, left=self._all)
