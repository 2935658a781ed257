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
    Task,
    as_given,
    chosen_labels,
    columns,
    distributions,
    matched,
    matched_if_alike,
    probabilities_and_labels,
    scores_and_labels,
)
from fitkit.metrics.group import MetricSpec, OutputGroup
from fitkit.metrics.named import NAMES as METRICS
from fitkit.metrics.named import Named
from fitkit.metrics.sums import Batch as MetricBatch
from fitkit.metrics.sums import Mean, State, Values, outside_inference
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
    "State",
    "Task",
    "Values",
    "as_given",
    "chosen_labels",
    "columns",
    "distributions",
    "is_torchmetric",
    "matched",
    "matched_if_alike",
    "outside_inference",
    "probabilities_and_labels",
    "scores_and_labels",
]
