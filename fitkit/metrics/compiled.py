"""The metrics that compile was given."""

from __future__ import annotations

from typing import Any

from fitkit.metrics.given import Given
from fitkit.metrics.meters import Meters
from fitkit.metrics.names import LogKeys
from fitkit.outputs import SINGLE


class CompiledMetrics:
    """The metrics that compile was given, checked at once.

    Args:
        metrics: a metric, or a list (for every output), a list of lists (one an output) or a
            dict (one entry an output; for a net with a single output chosen names). A metric is
            a name, a torchmetrics object, a `MetricCollection`, or a callable
            `(prediction, target)` that gives the batch's mean or one value a sample.
        weighted_metrics: the same; their values are weighted by the sample weights. Only means
            over samples can be: names such as `"accuracy"` and `"mae"`, and callables that
            give one value a sample.

    Raises:
        ConfigurationError: an unknown name, or what can't be a metric.
    """

    def __init__(self, metrics: Any = None, weighted_metrics: Any = None) -> None:
        self._given = (Given(metrics, "metrics"), Given(weighted_metrics, "weighted_metrics"))

    def meters(self) -> Meters:
        """A fresh set of sums, for one call of fit or evaluate.

        The user's torchmetrics objects are copied, so that calls can nest; the objects
        themselves stay as they are.
        """
        return Meters(self._given)

    @property
    def known_names(self) -> list[str]:
        """The names logged by a net with a single output, as far as they are known by now."""
        keys = LogKeys([SINGLE])
        return [
            keys.key(SINGLE, entry.name, weighted=entry.weighted)
            for given in self._given
            for entry in given.for_unnamed_output()
        ]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(self._given)
