"""Which torchmetrics metrics may see several batches in one update.

torchmetrics doesn't declare it. Sums and concatenations (`dist_reduce_fx`) may be of values a
batch, as those of `CriticalSuccessIndex` along a sequence are; and `full_state_update`, which
Pearson's and Kendall's correlation set, only says what `forward` needs. So the classes are listed
by the `update` that they run, after a look at each, and tests/unit/metrics/test_joinable.py holds
joined updates against one a batch for every class of `torchmetrics.classification` and
`torchmetrics.regression`. What isn't listed sees each batch as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchmetrics import Metric

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
