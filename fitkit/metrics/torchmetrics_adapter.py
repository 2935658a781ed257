"""Gauges over torchmetrics: metrics that fitkit builds, and objects that users gave."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError
from fitkit.metrics.conversions import (
    AsGiven,
    Choices,
    Conversion,
    FirstBatch,
    Matched,
    Scores,
    Task,
)
from fitkit.metrics.sums import Batch
from fitkit.trees import map_leaves

if TYPE_CHECKING:
    from torchmetrics import Metric


_BY_PROBABILITY = (
    "MulticlassPrecisionRecallCurve",
    "MulticlassCalibrationError",
    "MulticlassHingeLoss",
)
"""Those multiclass classes that turn predictions beyond [0, 1] into probabilities themselves."""


class Wrapped:
    """A torchmetrics metric.

    Args:
        metric: the metric; from now on this one's own.

    Attributes:
        samples: how many were added.
    """

    weighted = False

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.samples = 0

    @property
    def keeps_batches(self) -> bool:
        """Whether its state is a list, of the very tensors that it was given as a rule."""
        return any(isinstance(state, list) for state in _inner(self.metric)._defaults.values())

    @property
    def updated(self) -> bool:
        """Whether there is a result; torchmetrics warns where one is asked for too early."""
        return self.samples > 0

    def result(self) -> Any:
        """What the metric computes over all samples so far."""
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()
        self.samples = 0

    def to(self, device: torch.device) -> None:
        self.metric.to(device)


class Each(Wrapped):
    """A metric that must see each batch by itself.

    Args:
        metric: the metric.
        conversion: what its `update` is given; None: each batch as it came, of any structure.
    """

    def __init__(self, metric: Metric, conversion: Conversion | None = None) -> None:
        super().__init__(metric)
        self._keeps_batches = self.keeps_batches
        self.conversion = conversion

    def see(self, prediction: Any, target: Any, weight: Tensor | None, samples: int) -> None:
        """Add a batch; weights don't count."""
        if self.conversion is not None:
            prediction, target = self.conversion(prediction, target)
        if self._keeps_batches:
            # The caller may overwrite its memory with the next batch.
            prediction, target = map_leaves(_copied, prediction), map_leaves(_copied, target)
        with torch.inference_mode(False), torch.no_grad():
            self.metric.update(prediction, target)
        self.samples += samples


class Joined(Wrapped):
    """A metric to which one update with joined batches is the same as one a batch.

    Args:
        metric: the metric.
        conversion: what its `update` is given.
        finish: what makes the result of what `compute` gives; None: nothing.
        least_samples: fewer have no result.

    Attributes:
        leader: the one that gathers this one's numbers too; None: it does so itself.
    """

    def __init__(
        self,
        metric: Metric,
        conversion: Conversion,
        *,
        finish: Callable[[Any], Any] | None = None,
        least_samples: int = 1,
    ) -> None:
        super().__init__(metric)
        self.conversion = conversion
        self.leader: Joined | None = None
        self._finish = finish
        self._least_samples = least_samples

    @property
    def is_exact(self) -> bool:
        """Whether no bit of its state depends on which batches came together."""
        return is_exact(_inner(self.metric))

    @property
    def updated(self) -> bool:
        """Whether there is a result."""
        return self.samples >= self._least_samples

    def bookmark(self) -> Callable[[], None]:
        """What makes the metric forget later batches, when it is called."""
        samples, metric = self.samples, self.metric
        states = {} if self.leader is not None else _states_of(metric)
        counts = [(part, part._update_count) for part in (metric, _inner(metric))]

        def back() -> None:
            self.samples = samples
            for name, state in states.items():
                setattr(metric, name, state)
            for part, count in counts:
                part._update_count, part._computed = count, None

        return back

    def update(self, batch: Batch) -> None:
        """Add a batch."""
        if self.leader is None:
            self.metric.update(*batch.read(self.conversion))
        self.samples += batch.samples

    def result(self) -> Any:
        """What the metric computes over all samples so far."""
        if self.leader is not None:
            _adopt_state(self.metric, self.leader.metric)
        value = self.metric.compute()
        return value if self._finish is None else self._finish(value)


def _states_of(metric: Metric) -> dict[str, Tensor | list[Tensor]]:
    """A metric's states, which later updates don't change."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {n: list(s) if isinstance(s, list) else s.clone() for n, s in states.items()}


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def share_states(sums: Iterable[object]) -> None:
    """Let metrics that gather the same numbers gather them once.

    Precision, recall and F1 all count true and false positives. Equal are metrics with the
    same `update`, the same settings that it may read, and the same conversion. (torchmetrics'
    own compute groups compare states after the first batch, where metrics of different
    thresholds can agree by chance, and stay grouped.)
    """
    leaders: dict[Any, Joined] = {}
    for one in sums:
        if isinstance(one, Joined):
            key = _update_key(one)
            if key is not None and leaders.setdefault(key, one) is not one:
                one.leader = leader = leaders[key]
                if getattr(one.metric, "validate_args", False):
                    leader.metric.validate_args = True  # for both of them


def _update_key(one: Joined) -> Any:
    metric = one.metric
    owner = update_owner(metric)
    if _inner(metric) is not metric or _package(owner) != "torchmetrics.classification":
        return None
    settings: list[Any] = []
    # What `update` may read was set by the class that defines it, from its arguments.
    for name in inspect.signature(owner).parameters:
        if name != "validate_args":
            value = getattr(metric, name, None)
            settings.append(repr(value.tolist() if isinstance(value, Tensor) else value))
    shapes = tuple((n, getattr(state, "shape", None)) for n, state in metric._defaults.items())
    return owner, tuple(settings), shapes, one.conversion


def _adopt_state(follower: Metric, leader: Metric) -> None:
    for name in leader._defaults:
        setattr(follower, name, getattr(leader, name))
    follower._update_count = leader._update_count
    follower._computed = None


def torchmetrics_module(name: str) -> ModuleType:
    """`torchmetrics.<name>`, imported at its first use: that takes 1.5 s."""
    return importlib.import_module(f"torchmetrics.{name}")


def is_torchmetric(value: object, class_name: str = "Metric") -> bool:
    """Whether a value is a torchmetrics object; asked without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, getattr(module, class_name))


def update_owner(metric: Metric) -> type:
    """The class whose `update` a metric runs; that of the metric inside a `ClasswiseWrapper`."""
    return next(owner for owner in type(_inner(metric)).__mro__ if "update" in vars(owner))


def _package(owner: type) -> str:
    return owner.__module__.rpartition(".")[0]


def _inner(metric: Metric) -> Metric:
    return metric.metric if type(metric).__name__ == "ClasswiseWrapper" else metric  # type: ignore[return-value]


def wrap_object(metric: Metric, first: FirstBatch) -> Joined | Each:
    """A one over a copy of a user's metric, so that calls can nest.

    Metrics of `torchmetrics.classification` get probabilities, never logits, and labels in the
    shape that they take; those of `torchmetrics.regression` (N,) beside (N, 1) reconciled; all
    others each batch as it came.
    """
    copy = metric.clone()
    copy.reset()
    _keep_local(copy)
    owner = update_owner(copy)
    conversion: Conversion
    if _package(owner) == "torchmetrics.regression":
        conversion = Matched(strict=False)
    elif _package(owner) == "torchmetrics.classification" and "group" not in owner.__module__:
        conversion = _object_reading(_inner(copy), owner, first)
    else:
        return Each(copy)
    return Joined(copy, conversion) if joins(_inner(copy), owner) else Each(copy, conversion)


def _object_reading(metric: Metric, owner: type, first: FirstBatch) -> Conversion:
    if not owner.__name__.startswith("Multiclass"):
        scale = first.scale()
        if getattr(metric, "normalization", "sigmoid") is None:
            scale = "as_given"  # the user asked that nothing be done to predictions
        return Scores(Task("binary", scale=scale))
    if not first.prediction.is_floating_point():
        return AsGiven()
    task = first.shape_of_task("classes")
    by_probability = any(base.__name__ in _BY_PROBABILITY for base in type(metric).__mro__)
    return Scores(task) if by_probability else Choices(task)


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


COUNTS = frozenset(
    {
        "BinaryStatScores",
        "MulticlassStatScores",
        "MultilabelStatScores",
        "BinaryConfusionMatrix",
        "MulticlassConfusionMatrix",
        "MultilabelConfusionMatrix",
        "MulticlassExactMatch",
        "MultilabelExactMatch",
    }
)
"""They count entries: whole numbers."""

ROWS = frozenset(
    {
        "BinaryPrecisionRecallCurve",
        "MulticlassPrecisionRecallCurve",
        "MultilabelPrecisionRecallCurve",
        "BinaryCalibrationError",
        "MulticlassCalibrationError",
        "CosineSimilarity",
        "KendallRankCorrCoef",
        "SpearmanCorrCoef",
    }
)
"""They keep a row a sample, in order (or, with `thresholds`, count)."""

SUMS = frozenset(
    {
        "BinaryHingeLoss",
        "MulticlassHingeLoss",
        "MultilabelCoverageError",
        "MultilabelRankingAveragePrecision",
        "MultilabelRankingLoss",
        "ContinuousRankedProbabilityScore",
        "CriticalSuccessIndex",
        "ExplainedVariance",
        "JensenShannonDivergence",
        "KLDivergence",
        "LogCoshError",
        "MeanAbsoluteError",
        "MeanAbsolutePercentageError",
        "MeanSquaredError",
        "MeanSquaredLogError",
        "MinkowskiDistance",
        "R2Score",
        "RelativeSquaredError",
        "SymmetricMeanAbsolutePercentageError",
        "TweedieDevianceScore",
        "WeightedMeanAbsolutePercentageError",
    }
)
"""They add up a value a sample: fractions, so that the last digits depend on the order."""

MOMENTS = frozenset({"PearsonCorrCoef", "NormalizedRootMeanSquaredError"})
"""They bring means and variances up to date by formulas that hold for batches of any size."""

_ALL = COUNTS | ROWS | SUMS | MOMENTS


def joins(metric: Metric, owner: type) -> bool:
    """Whether one update with joined batches gives what one update a batch gives.

    Args:
        owner: the class whose `update` the metric runs.
    """
    if owner.__name__ not in _ALL or not owner.__module__.startswith("torchmetrics."):
        return False
    # It then keeps one row a batch.
    return getattr(metric, "keep_sequence_dim", None) is None


def is_exact(metric: Metric) -> bool:
    """Whether no bit of its state depends on which batches are joined: it has no sums of fractions.

    Rows that are kept stay the same however they came.
    """
    return all(
        isinstance(state, list) or not torch.is_floating_point(state)
        for state in metric._defaults.values()
    )
