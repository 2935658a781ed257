"""torchmetrics' metrics, built by name or given as objects: fed, read, and joined over ranks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError
from fitkit.extras.metric_conversions import probabilities_and_labels
from fitkit.outputs import EMPTY_MEAN
from fitkit.seams.metrics import (
    Conversion,
    FirstBatch,
    MetricBatch,
    State,
    Task,
    as_given,
    is_torchmetric,
    matched_if_alike,
    outside_inference,
    scores_and_labels,
)
from fitkit.tensors import values_for_copies
from fitkit.trees import copied, map_leaves

if TYPE_CHECKING:
    from torchmetrics import Metric


_BY_PROBABILITY = (
    "MulticlassPrecisionRecallCurve",
    "MulticlassCalibrationError",
    "MulticlassHingeLoss",
)
"""Those multiclass classes that turn predictions beyond [0, 1] into probabilities themselves."""


class TorchMetric:
    """A torchmetrics metric over batches.

    Args:
        metric: the metric; from now on this object's own.
        conversion: what its `update` is given; None: each batch as it came, of any structure.
        joins: whether one update with joined batches is the same as one per batch.
        finish: what makes the result of what `compute` gives; None: nothing.
        defined: which entries of what `compute` gives can be computed of what was counted, from the
            metric and these entries; the others are left out. None: all of them.
        least_samples: of fewer nothing can be computed.

    Attributes:
        samples: how many were added.
        keeps_batches: whether its state is a list, of the very tensors that it was given as a rule.
    """

    weighted = False

    def __init__(
        self,
        metric: Metric,
        conversion: Conversion | None,
        *,
        joins: bool = True,
        finish: Callable[[Any], Any] | None = None,
        defined: Callable[[Any, Tensor], Tensor] | None = None,
        least_samples: int = 1,
    ) -> None:
        self.metric = metric
        self.conversion = conversion
        self.joins = joins
        self.samples: int = 0
        self.keeps_batches: bool = any(
            isinstance(s, list) for s in _inner(metric)._defaults.values()
        )
        self._finish = finish
        self._defined = defined
        self._least_samples = least_samples

    @property
    def is_exact(self) -> bool:
        """Whether no bit of its state depends on which batches came together."""
        return is_exact(_inner(self.metric))

    @property
    def updated(self) -> bool:
        """Whether there is a result; torchmetrics warns where one is asked for too early."""
        return self.samples > 0

    @outside_inference()
    def update(self, batch: MetricBatch) -> None:
        """Add a batch; weights don't count."""
        pair = batch.prediction, batch.target
        if self.conversion is not None:
            pair = batch.converted(self.conversion)
        if not self.joins:
            # It may write into targets, and keep what the next batch overwrites.
            pair = copied(pair[0]) if self.keeps_batches else pair[0], copied(pair[1])
        self.metric.update(*pair)
        self.samples += batch.samples

    def result(self) -> Any:
        """Return what the metric computes over all samples so far."""
        if self.samples < self._least_samples:
            return EMPTY_MEAN
        if _counts_nothing(_inner(self.metric)):
            return self._nothing()
        value = self.metric.compute()
        if self._defined is not None:
            value = value[self._defined(self.metric, value)]
            if not value.numel():
                return EMPTY_MEAN
        return value if self._finish is None else self._finish(value)

    def _nothing(self) -> Any:
        """Return the result where nothing counts: NaN, in the result's shape."""
        try:
            value = self.metric.compute()
        except (IndexError, RuntimeError, ValueError):  # some compute nothing from no rows
            return EMPTY_MEAN
        empty = map_leaves(_filled_with_nan, value if self._finish is None else self._finish(value))
        is_mean = isinstance(empty, Tensor) and empty.numel() == 1 and empty.is_floating_point()
        return EMPTY_MEAN if is_mean else empty

    def snapshot(self) -> Callable[[], None]:
        """Give what makes the metric forget later batches."""
        samples, metric = self.samples, self.metric
        states = _states_of(metric)
        counts = [(part, part._update_count) for part in (metric, _inner(metric))]

        def restore() -> None:
            self.samples = samples
            for name, state in states.items():
                setattr(metric, name, state)
            for part, count in counts:
                part._update_count, part._computed = count, None

        return restore

    def state(self) -> State:
        """Return what was counted on this rank, on the CPU: plain data that can be sent."""
        return {"samples": self.samples, "states": metric_states(self.metric)}

    def load_merged(self, states: list[State]) -> None:
        """Take what all ranks have counted, from the `state` of each."""
        self.samples = sum(state["samples"] for state in states)
        _load_metric(self.metric, [state["states"] for state in states if state["samples"]])

    @outside_inference()
    def reset(self) -> None:
        """Forget all samples."""
        self.metric.reset()
        self.samples = 0

    def to(self, device: torch.device) -> None:
        self.metric.to(device)


def metric_states(metric: Metric) -> State:
    """Return what a torchmetrics object has counted, on the CPU: plain data that can be sent."""
    found: State = {}
    for name in metric._reductions:
        value = getattr(metric, name)
        if isinstance(value, list):
            rows = [
                part.detach().cpu() if part.ndim else part.detach().cpu()[None] for part in value
            ]
            found[name] = [torch.cat(rows)] if rows else []
        else:
            # A copy on the CPU too: later updates change the state in place.
            found[name] = value.detach().to("cpu", copy=True)
    return found


def _load_metric(metric: Metric, states: list[State]) -> None:
    """As torchmetrics itself merges states: by each state's own reduction."""
    if not states:
        return
    reductions: dict[str, Any] = metric._reductions
    for name, reduction in reductions.items():
        values = [state[name] for state in states]
        merged: Any
        if isinstance(values[0], list):
            merged = [part.to(metric.device) for value in values for part in value]
            merged = merged if reduction is None or not merged else reduction(merged)
            if isinstance(merged, Tensor):
                merged = [merged]
        else:
            stacked = torch.stack([value.to(metric.device) for value in values])
            merged = stacked if reduction is None else reduction(stacked)
        setattr(metric, name, merged)
    metric._update_count = max(metric._update_count, 1)
    metric._computed = None


def merged_metric_value(metric: Metric, states: list[State]) -> Any:
    """Return what a torchmetrics object computes from the states of several ranks; it stays as it
    is.

    Args:
        states: each rank's `metric_states`.
    """
    whole = copy.deepcopy(metric, values_for_copies(metric))
    # Else it would exchange its states with the other ranks once more.
    whole.sync_on_compute = whole._to_sync = False
    _load_metric(whole, states)
    return whole.compute()


def _states_of(metric: Metric) -> dict[str, Tensor | list[Tensor]]:
    # Copies: later updates change the states in place.
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {n: list(s) if isinstance(s, list) else s.clone() for n, s in states.items()}


def _counts_nothing(metric: Metric) -> bool:
    """Whether all labels so far were ignored: nothing is in the states then."""
    if getattr(metric, "ignore_index", None) is None or not _package(type(metric)).startswith(
        "torchmetrics."
    ):
        return False
    for name, default in metric._defaults.items():
        state = getattr(metric, name)
        if isinstance(state, list) or isinstance(default, list):
            if any(part.numel() for part in state):
                return False
        elif not torch.equal(state, default.to(state.device)):
            return False
    return True


def _filled_with_nan(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return torch.full_like(leaf, torch.nan)
    return leaf


def torchmetrics_module(name: str) -> ModuleType:
    """`torchmetrics.<name>`, imported at its first use: that takes 1.5 s."""
    return importlib.import_module(f"torchmetrics.{name}")


def update_owner(metric: Metric) -> type:
    """Return the class whose `update` a metric runs; that of the metric inside a
    `ClasswiseWrapper`.
    """
    return next(owner for owner in type(_inner(metric)).__mro__ if "update" in vars(owner))


def _package(owner: type) -> str:
    return owner.__module__.rpartition(".")[0]


def _inner(metric: Metric) -> Metric:
    return metric.metric if type(metric).__name__ == "ClasswiseWrapper" else metric  # type: ignore[return-value]


def wrap_object(metric: Metric, first: FirstBatch) -> TorchMetric:
    """Return a copy of a user's metric, so that calls can nest.

    Metrics of `torchmetrics.classification` get probabilities, never logits, and labels in the
    shape that they take; those of `torchmetrics.regression` (N,) beside (N, 1) reconciled; all
    others each batch as it came.
    """
    own = copy.deepcopy(metric, values_for_copies(metric))
    own.reset()
    _keep_local(own)
    owner = update_owner(own)
    conversion: Conversion
    if _package(owner) == "torchmetrics.regression":
        conversion = matched_if_alike
    elif _package(owner) == "torchmetrics.classification" and "group" not in owner.__module__:
        conversion = _object_conversion(_inner(own), owner, first)
    else:
        return TorchMetric(own, None, joins=False)
    return TorchMetric(own, conversion, joins=joins(_inner(own), owner))


def _object_conversion(metric: Metric, owner: type, first: FirstBatch) -> Conversion:
    if not owner.__name__.startswith("Multiclass"):
        scale = first.scale()
        if getattr(metric, "normalization", "sigmoid") is None:
            scale = "as_given"  # the user asked that nothing be done to predictions
        return probabilities_and_labels(Task("binary", scale=scale))
    if not first.prediction.is_floating_point():
        return as_given
    task = first.shape_of_task("classes")
    by_probability = any(base.__name__ in _BY_PROBABILITY for base in type(metric).__mro__)
    return probabilities_and_labels(task) if by_probability else scores_and_labels(task)


def _keep_local(metric: Metric) -> None:
    """Let `compute` give this rank's value: states are reduced in one place, not by each metric."""
    for part in metric.modules():
        if is_torchmetric(part):
            part.sync_on_compute = False  # type: ignore[assignment]
            part._to_sync = False  # type: ignore[assignment]


def refuse_aggregation(metric: Metric, argument: str) -> None:
    """Refuse `MeanMetric` and its like, which would take the targets for weights."""
    if update_owner(metric).__module__ == "torchmetrics.aggregation":
        raise ConfigurationError(
            f"{argument} has {type(metric).__name__}, which sums up single values and knows no "
            "targets. Log the value in a training_step with self.log(name, value)."
        )


JOINABLE = frozenset({
    # They count entries: whole numbers.
    "BinaryStatScores", "MulticlassStatScores", "MultilabelStatScores",
    "BinaryConfusionMatrix", "MulticlassConfusionMatrix", "MultilabelConfusionMatrix",
    "MulticlassExactMatch", "MultilabelExactMatch",
    # They keep a row per sample, in order (or, with `thresholds`, count).
    "BinaryPrecisionRecallCurve", "MulticlassPrecisionRecallCurve",
    "MultilabelPrecisionRecallCurve", "BinaryCalibrationError", "MulticlassCalibrationError",
    "CosineSimilarity", "KendallRankCorrCoef", "SpearmanCorrCoef",
    # They add up a value per sample: fractions, so that the last digits depend on the order.
    "BinaryHingeLoss", "MulticlassHingeLoss", "MultilabelCoverageError",
    "MultilabelRankingAveragePrecision", "MultilabelRankingLoss",
    "ContinuousRankedProbabilityScore", "CriticalSuccessIndex", "ExplainedVariance",
    "JensenShannonDivergence", "KLDivergence", "LogCoshError", "MeanAbsoluteError",
    "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogError",
    "MinkowskiDistance", "R2Score", "RelativeSquaredError",
    "SymmetricMeanAbsolutePercentageError", "TweedieDevianceScore",
    "WeightedMeanAbsolutePercentageError",
    # They bring means and variances up to date by formulas that hold for batches of any size.
    "PearsonCorrCoef", "NormalizedRootMeanSquaredError",
})  # fmt: skip
"""The classes of which one update with joined batches gives what one update per batch gives."""


def joins(metric: Metric, owner: type) -> bool:
    """Whether one update with joined batches gives what one update a batch gives.

    Args:
        owner: the class whose `update` the metric runs.
    """
    if owner.__name__ not in JOINABLE or not owner.__module__.startswith("torchmetrics."):
        return False
    # It then keeps one row per batch.
    return getattr(metric, "keep_sequence_dim", None) is None


def is_exact(metric: Metric) -> bool:
    """Whether no bit of its state depends on which batches are joined: it has no sums of fractions.

    Rows that are kept stay the same however they came.
    """
    return all(
        isinstance(state, list) or not torch.is_floating_point(state)
        for state in metric._defaults.values()
    )
