"""Gauges: what sums up one metric over the batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError
from fitkit.metrics.conversions import IGNORED, Conversion

Values = Callable[[Tensor, Tensor], Tensor]
FOLD_EVERY = 20
"""So many parts of a sum wait on the device before they are added up."""


class Batch:
    """Samples on their way into the sums, with each conversion of them done once.

    Args:
        prediction: (N, ...).
        target: (N, ...).
        weight: one weight a sample (N,) or an entry; None: 1 each.
    """

    def __init__(self, prediction: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        self.prediction = prediction
        self.target = target
        self.weight = weight
        self.samples = prediction.shape[0]
        self._read: dict[Conversion, tuple[Tensor, Tensor]] = {}

    def read(self, conversion: Conversion) -> tuple[Tensor, Tensor]:
        """The pair as this conversion gives it."""
        pair = self._read.get(conversion)
        if pair is None:
            pair = self._read[conversion] = conversion(self.prediction, self.target)
        return pair


class Totals:
    """A sum of values and the sum of their weights, on the device.

    Attributes:
        state: (2,): both sums in float64 (float32 where the device has no float64). Adding
            the states of several ranks gives the state over all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.zeros(2, dtype=widest_dtype(device), device=device)
        self.updated = False
        self._values: list[Tensor | float] = []
        self._weights: list[Tensor | float] = []

    def add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add a weighted sum of values (without dimensions) and the weights' sum."""
        self._values.append(value)
        self._weights.append(weight)
        self.updated = True
        if len(self._values) >= FOLD_EVERY:
            self.settle()

    def bookmark(self) -> Callable[[], None]:
        """What makes the sums again what they are now, when it is called."""
        kept = self.state.clone(), list(self._values), list(self._weights), self.updated

        def back() -> None:
            self.state, self._values, self._weights, self.updated = kept

        return back

    def settle(self) -> None:
        """Bring `state` up to date."""
        self.state = self.summed()
        self._values.clear()
        self._weights.clear()

    def summed(self) -> Tensor:
        """Both sums so far (2,), in memory of their own; nothing here changes by that."""
        sums = self.state.clone()
        if self._values:
            sums[0] += self._sum(self._values)
            sums[1] += self._sum(self._weights)
        return sums

    def _sum(self, parts: list[Tensor | float]) -> Tensor | float:
        known = math.fsum(part for part in parts if not isinstance(part, Tensor))
        waiting = [part for part in parts if isinstance(part, Tensor)]
        if not waiting:
            return known
        return torch.stack(waiting).sum(dtype=self.state.dtype) + known

    def mean(self) -> float:
        """The weighted mean; 0.0 where all weights are 0, as in Keras."""
        value, weight = self.summed().tolist()
        return value / weight if weight else 0.0

    def reset(self) -> None:
        self._values.clear()
        self._weights.clear()
        self.state.zero_()
        self.updated = False

    def to(self, device: torch.device) -> None:
        self.settle()
        self.state = self.state.to(device=device, dtype=widest_dtype(device))


class Mean:
    """The mean of a function's values over all samples, weighted or not.

    Args:
        conversion: what the function is given.
        values: gives one value a sample (N,) or an entry (N, ...).
        device: where the sums are kept.
        skip_ignored: whether entries whose target is `IGNORED` count for nothing; the
            function must give 0 for them.
        finish: what makes the result of the mean; None: nothing.

    Attributes:
        conversion: what the function is given.
        totals: the sums.
        weighted: whether batches' weights count.
        keeps_batches: whether what it was given is still there later; sums keep nothing.
    """

    keeps_batches = False

    def __init__(
        self,
        conversion: Conversion,
        values: Values,
        device: torch.device,
        *,
        skip_ignored: bool = False,
        finish: Callable[[float], float] | None = None,
    ) -> None:
        self.totals = Totals(device)
        self.weighted = False
        self.conversion = conversion
        self._values = values
        self._skip_ignored = skip_ignored
        self._finish = finish
        self._counts = False

    @property
    def is_exact(self) -> bool:
        """Whether no bit of the sums depends on which batches came together."""
        return self._counts and not self.weighted

    @property
    def updated(self) -> bool:
        """Whether there is a result."""
        return self.totals.updated

    def bookmark(self) -> Callable[[], None]:
        """What makes the metric forget later batches, when it is called."""
        return self.totals.bookmark()

    def update(self, batch: Batch) -> None:
        """Add a batch."""
        prediction, target = batch.read(self.conversion)
        values = self._values(prediction, target)
        self._counts = not values.is_floating_point()
        counted = None
        if self._skip_ignored and target.shape == values.shape:
            counted = target != IGNORED
        weight = batch.weight if self.weighted else None
        if weight is None:
            dtype = self.totals.state.dtype if values.is_floating_point() else None
            self.totals.add(
                values.sum(dtype=dtype), values.numel() if counted is None else counted.sum()
            )
            return
        weight = weights_of(values, weight, self.totals.state.dtype)
        weight = weight if counted is None else weight * counted
        self.totals.add((values * weight).sum(), weight.sum())

    def result(self) -> float:
        """The metric over all samples so far."""
        mean = self.totals.mean()
        return mean if self._finish is None else self._finish(mean)

    def reset(self) -> None:
        self.totals.reset()

    def to(self, device: torch.device) -> None:
        self.totals.to(device)


class Call:
    """The mean of what a user's function gives, over samples; it sees each batch as it came.

    Args:
        function: `(prediction, target)` → a scalar, the batch's mean, or one value a sample.
        device: where the sums are kept.

    Attributes:
        totals: the sums.
        weighted: whether batches' weights count; then a value a sample is needed.
    """

    def __init__(self, function: Callable[[Any, Any], Any], device: torch.device) -> None:
        self.totals = Totals(device)
        self.weighted = False
        self._function = function

    @property
    def updated(self) -> bool:
        """Whether there is a result."""
        return self.totals.updated

    def see(self, prediction: Any, target: Any, weight: Tensor | None, samples: int) -> None:
        """Call the function and add what it gives."""
        value = self._function(prediction, target)
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, device=self.totals.state.device)
        value = value.detach()
        each = value.ndim > 0 and value.shape[0] == samples
        if not each and (value.numel() != 1 or self.weighted):
            raise self._unusable(value, samples)
        if not each:
            self.totals.add(value.reshape(()) * samples, samples)
        elif self.weighted and weight is not None:
            weight = weights_of(value, weight, self.totals.state.dtype)
            self.totals.add((value * weight).sum(), weight.sum())
        else:
            dtype = self.totals.state.dtype if value.is_floating_point() else None
            self.totals.add(value.sum(dtype=dtype), value.numel())

    def _unusable(self, value: Tensor, samples: int) -> ConfigurationError:
        wanted = "one value a sample" if self.weighted else "a number or one value a sample"
        return ConfigurationError(
            f"it gave a result of shape {tuple(value.shape)} for {samples} samples, but "
            f"{'weighted_metrics need' if self.weighted else 'metrics need'} {wanted}, "
            f"shape ({samples},)."
        )

    def result(self) -> float:
        """The metric over all samples so far."""
        return self.totals.mean()

    def reset(self) -> None:
        self.totals.reset()

    def to(self, device: torch.device) -> None:
        self.totals.to(device)


def weights_of(values: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in the values' shape: (N,) weights count for all entries of their sample."""
    if weight.ndim > 1 and weight.numel() == weight.shape[0]:
        weight = weight.reshape(-1)
    if weight.shape != values.shape[: weight.ndim]:
        raise ConfigurationError(
            f"sample weights of shape {tuple(weight.shape)} do not belong to values of shape "
            f"{tuple(values.shape)}: give one weight a sample."
        )
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    return weight.to(device=values.device, dtype=dtype).expand(values.shape)


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, in which sums over an epoch stay exact; float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64
