"""What is summed up for a metric that is a mean: over batches, then over ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fitkit.accelerators import widest_dtype
from fitkit.errors import ConfigurationError
from fitkit.losses.guards import check_broadcast
from fitkit.metrics.conversions import Conversion, as_given
from fitkit.outputs import EMPTY_MEAN, IGNORED
from fitkit.samples import samples_among
from fitkit.trees import copied

Values = Callable[[Any, Any], Any]
State = dict[str, Any]
FOLD_EVERY = 20
"""So many parts of a sum wait on the device before they are added up."""


def changeable() -> AbstractContextManager[None]:
    """Leave inference mode, in which states would become tensors that can't be changed later."""
    return outside_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """As `changeable`, also as a decorator."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class MetricBatch:
    """Samples to be counted, with each conversion of them made once.

    Args:
        prediction: (N, ...), or any structure for metrics that see each batch as it came.
        target: (N, ...), or any structure.
        weight: one weight per sample (N,) or an entry; None: 1 each.
    """

    def __init__(self, prediction: Any, target: Any, weight: Tensor | None = None) -> None:
        self.prediction = prediction
        self.target = target
        self.weight = weight
        self._converted: dict[Conversion, tuple[Tensor, Tensor]] = {}

    @property
    def samples(self) -> int:
        """The number of samples."""
        return samples_among(self.prediction)

    def converted(self, conversion: Conversion) -> tuple[Tensor, Tensor]:
        """Return the pair as this conversion gives it."""
        pair = self._converted.get(conversion)
        if pair is None:
            pair = self._converted[conversion] = conversion(self.prediction, self.target)
        return pair


class Mean:
    """The mean of a function's values over all samples, weighted or not.

    Args:
        conversion: what the function is given.
        values: gives one value per sample (N,) or an entry (N, ...).
        skip_ignored: whether entries whose target is `IGNORED` count for nothing; the
            function must give 0 for them.
        finish: what makes the result of the mean; None: nothing.

    Attributes:
        joins: whether batches may be joined before they are added.
        keeps_batches: whether what it was given is still there later; sums keep nothing.
        weighted: whether batches' weights count.
        updated: whether there is a result.
        totals: (2,): the sums of the values and of their weights, without those of the last
            batches, in float64 (float32 where the device has no float64).
    """

    joins = True
    keeps_batches = False

    def __init__(
        self,
        conversion: Conversion,
        values: Values,
        *,
        skip_ignored: bool = False,
        finish: Callable[[float], float] | None = None,
    ) -> None:
        self.conversion = conversion
        self.weighted = False
        self.updated: bool = False
        self.totals: Tensor = torch.zeros(2, dtype=torch.float64)
        self._last: list[tuple[Tensor | float, Tensor | float]] = []
        self._is_zero = True  # whether the totals are
        self._values = values
        self._skip_ignored = skip_ignored
        self._finish = finish
        self._counts = False

    @property
    def is_exact(self) -> bool:
        """Whether no bit of the sums depends on which batches came together."""
        return self._counts and not self.weighted

    @property
    def is_mean(self) -> bool:
        """Whether the result is the mean itself, and nothing that is made of it."""
        return self._finish is None

    def update(self, batch: MetricBatch) -> None:
        """Add a batch, whose tensors have no gradients."""
        values, counted = self.values_of(batch)
        self._add(*self._sums_of(values, batch.weight, counted))

    def values_of(self, batch: MetricBatch) -> tuple[Tensor, Tensor | None]:
        """Return a batch's values, and which of them count; None: all."""
        prediction, target = batch.converted(self.conversion)
        values = self._values(prediction, target)
        counted = target != IGNORED if self._skip_ignored else None
        if counted is not None and target.shape != values.shape:
            # A value of several entries counts if one of them does.
            is_of_several = target.shape[: values.ndim] == values.shape
            counted = counted.flatten(values.ndim).any(-1) if is_of_several else None
        return values, counted

    def _sums_of(
        self, values: Tensor, weight: Tensor | None, counted: Tensor | None
    ) -> tuple[Tensor | float, Tensor | float]:
        dtype, has_fractions = self.totals.dtype, values.is_floating_point()
        self._counts = not has_fractions
        if weight is None or not self.weighted:
            total = values.sum(dtype=dtype if has_fractions else None)
            return total, values.numel() if counted is None else counted.sum()
        weight = sample_weights(values, weight, dtype)
        weight = weight if counted is None else weight * counted
        return (values * weight).sum(), weight.sum()

    def _add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add a weighted sum of values (without dimensions) and the weights' sum."""
        self._last.append((value, weight))
        self.updated = True
        if len(self._last) >= FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        with changeable():
            self.totals = self.summed()
        self._last.clear()
        self._is_zero = False

    def summed(self) -> Tensor:
        """Return the sums of values and of weights so far (2,), in memory of their own."""
        sums = self.totals.clone()
        if self._last:
            values, weights = zip(*self._last, strict=True)
            sums[0] += _sum(values, sums.dtype)
            sums[1] += _sum(weights, sums.dtype)
        return sums

    def result(self) -> float:
        """Return the metric over all samples so far; `EMPTY_MEAN` where nothing counts."""
        if len(self._last) == 1 and self.totals.is_cpu:  # the same without small operations
            value, weight = (0.0, 0.0) if self._is_zero else self.totals.tolist()
            more, counted = self._last[0]
            value, weight = value + float(more), weight + float(counted)
        else:
            value, weight = self.summed().tolist()
        return self._finished(value, weight)

    def _finished(self, value: float, weight: float) -> float:
        if not weight:
            return EMPTY_MEAN
        mean = value / weight
        return mean if self._finish is None else self._finish(mean)

    def snapshot(self) -> Callable[[], None]:
        """Give what makes the sums again what they are now."""
        kept = self.totals.clone(), list(self._last), self.updated, self._is_zero

        def restore() -> None:
            self.totals, self._last, self.updated, self._is_zero = kept

        return restore

    def state(self) -> State:
        """Return what was summed up on this rank: plain data that can be sent."""
        return {"updated": self.updated, "totals": self.summed().tolist()}

    def load_merged(self, states: list[State]) -> None:
        """Take the sums of all ranks, from the `state` of each."""
        totals = torch.tensor([state["totals"] for state in states], dtype=torch.float64)
        self.reset()
        self.totals.copy_(totals.sum(0))
        self._is_zero = False
        self.updated = any(state["updated"] for state in states)

    def reset(self) -> None:
        """Forget all samples."""
        self._last.clear()
        if not self._is_zero:
            with changeable():
                self.totals.zero_()
            self._is_zero = True
        self.updated = False

    def to(self, device: torch.device) -> None:
        """Keep the sums on a device."""
        self._fold()
        self.totals = self.totals.to(device=device, dtype=widest_dtype(device))


class CallableMean(Mean):
    """The mean of what a user's function gives, over samples; it sees each batch as it came.

    Args:
        function: `(prediction, target)` → a scalar, the batch's mean, or one value per
            sample, which it must give to be weighted.
    """

    joins = False

    def __init__(self, function: Values) -> None:
        super().__init__(as_given, function)
        self._dims: tuple[int, ...] | None = None  # of the last prediction and target

    def values_of(self, batch: MetricBatch) -> tuple[Tensor, Tensor | None]:
        """Return what the function gives."""
        pair = batch.prediction, batch.target
        if (shapes := tuple(getattr(one, "ndim", 0) for one in pair)) != self._dims:
            self._dims = shapes
            check_broadcast("the callable", self._values, *pair)
        with torch.no_grad():
            value = self._values(batch.prediction, copied(batch.target))
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, device=self.totals.device)
        return value.detach(), None

    def update(self, batch: MetricBatch) -> None:
        """Call the function and add what it gives."""
        (value, _), samples = self.values_of(batch), batch.samples
        each = value.ndim > 0 and value.shape[0] == samples
        if not each and (value.numel() != 1 or self.weighted):
            wanted = "one value per sample" if self.weighted else "a number or one value per sample"
            raise ConfigurationError(
                f"it gave a result of shape {tuple(value.shape)} for {samples} samples, but "
                f"{'weighted_metrics need' if self.weighted else 'metrics need'} {wanted}, "
                f"shape ({samples},)."
            )
        with changeable():
            if each:
                self._add(*self._sums_of(value, batch.weight, None))
            else:
                self._add(value.reshape(()) * samples, samples)


def _sum(parts: tuple[Tensor | float, ...], dtype: torch.dtype) -> Tensor | float:
    known = math.fsum(part for part in parts if not isinstance(part, Tensor))
    on_device = [part for part in parts if isinstance(part, Tensor)]
    return torch.stack(on_device).sum(dtype=dtype) + known if on_device else known


def sample_weights(values: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights in the values' shape: (N,) weights count for all entries of their
    sample.
    """
    if weight.ndim > 1 and weight.numel() == weight.shape[0]:
        weight = weight.reshape(-1)
    if weight.shape != values.shape[: weight.ndim]:
        raise ConfigurationError(
            f"sample weights of shape {tuple(weight.shape)} do not belong to values of shape "
            f"{tuple(values.shape)}: give one weight per sample."
        )
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    return weight.to(device=values.device, dtype=dtype).expand(values.shape)
