"""torchmetrics' metrics, where a training has some: what knows them is imported then."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fitkit.metrics.conversions import FirstBatch
from fitkit.metrics.sums import State

if TYPE_CHECKING:
    from torchmetrics import Metric

    from fitkit.extras.torchmetrics_objects import TorchMetric


def is_torchmetric(value: object, class_name: str = "Metric") -> bool:
    """Whether a value is a torchmetrics object; asked without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, getattr(module, class_name))


def is_torchmetric_class(kind: type) -> bool:
    """Whether a class makes torchmetrics objects; asked without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and issubclass(kind, (module.Metric, module.MetricCollection))


def wrap_object(metric: Metric, first: FirstBatch) -> TorchMetric:
    """Return a copy of a user's metric, so that calls can nest."""
    from fitkit.extras.torchmetrics_objects import wrap_object as wrap

    return wrap(metric, first)


def metric_states(metric: Metric) -> State:
    """Return what a torchmetrics object has counted, on the CPU: plain data that can be sent."""
    from fitkit.extras.torchmetrics_objects import metric_states as states_of

    return states_of(metric)


def merged_metric_value(metric: Metric, states: list[State]) -> Any:
    """Return what a torchmetrics object computes from the states of several ranks; it stays as it
    is.

    Args:
        states: each rank's `metric_states`.
    """
    from fitkit.extras.torchmetrics_objects import merged_metric_value as merged

    return merged(metric, states)


def refuse_aggregation(metric: Metric, argument: str) -> None:
    """Refuse `MeanMetric` and its like, which would take the targets for weights."""
    from fitkit.extras.torchmetrics_objects import refuse_aggregation as refuse

    refuse(metric, argument)
