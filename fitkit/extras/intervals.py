"""How far the means of an evaluation may be from those of all samples of the kind.

Beside the sums of a mean, sums of squares and products are kept for each sample: its part of the
mean's sum, and of what the sum is divided by. They travel between ranks as all sums do, so
intervals are those of one process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import torch

from fitkit.extras.trials.distributions import t_reach
from fitkit.model import Model
from fitkit.outputs import SINGLE, LossHint, named_outputs
from fitkit.seams.losses import CompiledLoss
from fitkit.seams.metrics import (
    CompiledMetrics,
    FirstBatch,
    Mean,
    MetricBatch,
    OutputGroup,
    as_given,
)

SUFFIX = "_interval"
"""What stands after the name of a value whose interval it is."""

NORMAL_FROM = 2000
"""From so many samples on, Student's t is the normal distribution, to three digits."""


def with_intervals(model: Model, level: float, evaluate: Callable[[], Any]) -> dict[str, Any]:
    """Return an evaluation's values, each with its interval.

    Args:
        model: whose evaluation it is.
        level: how often an interval has the mean over all samples of the kind.
        evaluate: evaluates the model, and returns its values by name.

    Returns:
        The values, and beside each `<name>_interval`: low and high. None for what isn't a mean
        over samples, or whose samples can't be told apart.
    """
    record = model._fitkit
    before, names = record.compilation, record.log_names
    measured = _Measured(before.metrics, before.loss, level)
    record.compilation = dataclasses.replace(before, metrics=measured).on(before.strategy)
    try:
        values = evaluate()
    finally:
        record.compilation = before
        record.log_names = names
    plain = {name: value for name, value in values.items() if not name.endswith(SUFFIX)}
    record.log_names = list(plain)
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found[name] = value
        found[name + SUFFIX] = _checked(value, values.get(name + SUFFIX), name)
    return found


def _checked(value: Any, interval: Any, name: str) -> tuple[float, float] | None:
    """Return an interval, if it is one, and of this value."""
    if interval is None or not all(map(math.isfinite, interval)):
        return None
    low, high = interval
    # A step of the user's may return another loss than the one that was compiled.
    if name == "loss" and not math.isclose((low + high) / 2, value, rel_tol=1e-4, abs_tol=1e-9):
        return None
    return low, high


class _Measured(CompiledMetrics):
    """Compiled metrics, with moments beside those that are means, and beside the loss.

    Args:
        metrics: the metrics.
        loss: the loss.
        level: of the intervals.
    """

    def __init__(self, metrics: CompiledMetrics, loss: CompiledLoss, level: float) -> None:
        super().__init__()
        vars(self).update(vars(metrics))
        self._loss, self._level = loss, level

    def __bool__(self) -> bool:
        return True

    def start(
        self,
        prediction: Any,
        target: Any,
        hint: Callable[[Any], LossHint],
        trained: Sequence[Any] = (),
    ) -> None:
        if self.groups is not None:
            return
        super().start(prediction, target, hint, trained)
        assert self.groups is not None
        for group in self.groups.values():
            for name, one in list(group.sums.items()):
                if isinstance(one, Mean) and one.is_mean:
                    group.add(name + SUFFIX, Moments(one, self._level))
        is_pair = isinstance(prediction, torch.Tensor) and isinstance(target, torch.Tensor)
        loss = self._loss.begin()
        if not is_pair or loss.has_user_code or loss.takes_inputs:
            return
        loss.check(prediction, target)
        if loss.of_each([target]) is None:
            return
        if self.only is None:
            (output,) = named_outputs(prediction)
            self.add_group(output, OutputGroup({}, FirstBatch(prediction, target, hint(SINGLE))))
        assert self.only is not None
        self.only.add("loss" + SUFFIX, LossMoments(loss, self._level, prediction.device))


class Moments(Mean):
    """The sums by which a mean's interval is known, sample by sample.

    Args:
        of: the mean.
        level: of the interval.

    Attributes:
        totals: (6,): the samples that count, the sums of their parts of the mean's sum and of its
            divisor, and the sums of squares and products of both.
    """

    may_be_share = True  # of right answers, if all values are 0 and 1

    def __init__(self, of: Mean, level: float) -> None:
        super().__init__(of.conversion, as_given)
        self.joins = of.joins
        self.weighted = of.weighted
        self.totals = torch.zeros(6, dtype=of.totals.dtype, device=of.totals.device)
        self._of = of
        self._level = level

    def update(self, batch: MetricBatch) -> None:
        values, counted = self._of.values_of(batch)
        weight = batch.weight if self.weighted else None
        self._add_samples(batch.samples, values, counted, weight)

    def _add_samples(
        self,
        samples: int,
        values: Any,
        counted: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        divides_by_weight: bool = True,
    ) -> None:
        dtype = self.totals.dtype
        self.updated = True
        if not isinstance(values, torch.Tensor) or not values.ndim or len(values) % samples:
            # One number for several samples: nothing is known of each.
            self._last.append((torch.full_like(self.totals, math.nan), 0))
            return
        shares = torch.ones(values.shape, dtype=dtype, device=values.device)
        if counted is not None:
            shares = shares * counted
        weights = shares
        if weight is not None:
            weights = shares * weight.to(shares).reshape(-1, *[1] * (values.ndim - 1))
        own = (values.to(dtype) * weights).reshape(samples, -1).sum(1)
        of = (weights if divides_by_weight else shares).reshape(samples, -1).sum(1)
        pairs = [(of != 0).to(dtype), own, of, own * own, own * of, of * of]
        self._last.append((torch.stack([one.sum() for one in pairs]).to(self.totals.device), 0))

    def summed(self) -> torch.Tensor:
        """Return the sums so far (6,), in memory of their own."""
        sums = self.totals.clone()
        for part, _ in self._last:
            sums += part
        return sums

    def result(self) -> Any:
        """Return low and high; NaN where they aren't known."""
        count, own, of, squares, products, divisors = self.summed().tolist()
        if not count >= 2 or not of:
            return math.nan, math.nan
        mean = own / of
        if self.may_be_share and squares == own and divisors == of == count:
            return share_of(own, count, self._level)
        # Cochran, Sampling Techniques, 1977, section 6.4: the variance of a ratio of two sums.
        apart = max(squares - 2 * mean * products + mean * mean * divisors, 0.0)
        error = math.sqrt(apart * count / (count - 1)) / abs(of)
        reach = error * (
            NormalDist().inv_cdf((1 + self._level) / 2)
            if count >= NORMAL_FROM
            else t_reach(self._level, int(count) - 1)
        )
        return mean - reach, mean + reach


class LossMoments(Moments):
    """Those of a loss, whose weights multiply each sample's part, and divide nothing.

    Args:
        loss: which gives each sample's loss.
        level: of the interval.
        device: where its sums are.
    """

    may_be_share = False

    def __init__(self, loss: CompiledLoss, level: float, device: torch.device) -> None:
        plain = Mean(as_given, as_given)
        plain.weighted = True
        super().__init__(plain, level)
        self.to(device)
        self._loss = loss

    def update(self, batch: MetricBatch) -> None:
        of_each = self._loss.of_each([batch.target])
        values = None if of_each is None else of_each(batch.prediction, batch.target)
        samples, weight = batch.samples, batch.weight
        self._add_samples(samples, values, None, weight, divides_by_weight=False)


def share_of(count: float, total: float, level: float) -> tuple[float, float]:
    """Return the interval of a share, which stays within 0 and 1.

    Reference: Wilson, Probable inference, the law of succession, and statistical inference, 1927.

    Example:
        >>> from fitkit.extras.intervals import share_of
        >>> low, high = share_of(90, 100, 0.95)
        >>> round(low, 3), round(high, 3)
        (0.826, 0.945)
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, part = count / total, z * z / total
    middle = (share + part / 2) / (1 + part)
    reach = z / (1 + part) * math.sqrt(share * (1 - share) / total + part / (4 * total))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)
