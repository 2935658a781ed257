"""For metrics: what a name means.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.metrics import METRICS, Mean, Named, matched
    >>> def is_near(prediction, target):
    ...     return ((prediction - target).abs() < 0.5).float()
    >>> added = METRICS.add("near", Named(lambda first: Mean(matched, is_near), weightable=True))
    >>> model = fitkit.Model(torch.nn.Identity())
    >>> model.compile(loss="mse", metrics=["near"], accelerator="cpu", devices=1)
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> model.evaluate(x, torch.zeros(2, 1), verbose=0, return_dict=True)
    {'loss': 0.5, 'near': 0.5}
"""

from fitkit.metrics import CompiledMetrics
from fitkit.metrics.conversions import (
    Conversion,
    FirstBatch,
    Pair,
    Task,
    as_given,
    at_least_float32,
    chosen_labels,
    class_labels,
    classes_to_axis_1,
    entry_labels,
    matched,
    matched_if_alike,
    same_entries,
    scores_and_labels,
)
from fitkit.metrics.group import MetricSpec, OutputGroup
from fitkit.metrics.named import NAMES as METRICS
from fitkit.metrics.named import Named
from fitkit.metrics.sums import Mean, MetricBatch, State, Values, outside_inference
from fitkit.metrics.torchmetrics_adapter import is_torchmetric
from fitkit.record import LogOptions

__all__ = [
    "METRICS",
    "CompiledMetrics",
    "Conversion",
    "FirstBatch",
    "LogOptions",
    "Mean",
    "MetricBatch",
    "MetricSpec",
    "Named",
    "OutputGroup",
    "Pair",
    "State",
    "Task",
    "Values",
    "as_given",
    "at_least_float32",
    "chosen_labels",
    "class_labels",
    "classes_to_axis_1",
    "entry_labels",
    "is_torchmetric",
    "matched",
    "matched_if_alike",
    "outside_inference",
    "same_entries",
    "scores_and_labels",
]
