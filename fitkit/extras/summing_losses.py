"""Losses that sum over a batch's samples, where fitkit's losses are means.

An update of several parts weighs them by their samples. A sum would be weighed twice, and the
update would be as many times too small as it has parts: it is refused. An evaluation joins its
batches in the same way, and its loss depends on their size: that is said. Both go by what the loss
gives for some samples that come several times.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fitkit.random_states import (
    digest_of_random_state,
    random_state,
    set_random_state,
)
from fitkit.seams.losses import HALF_TYPES, undone
from fitkit.tensors import is_dense
from fitkit.trees import leaves, map_leaves

COPIES = (1, 4, 7)
"""How often the samples come: evenly, and far enough apart to tell a sum from noise."""
DRAWS = 16
"""How often a loss that draws random numbers is computed for the mean of its values."""
SAME = 1e-3
"""The relative difference of two equal values that were rounded."""
NOISY = 0.4
"""The same for two means of `DRAWS` values."""


def sums(function: Callable[[Any, Any], torch.Tensor], prediction: Any, target: Any) -> bool:
    """Whether a function's number grows by the same amount with each copy of some samples.

    A mean stays the same. A loss that compares samples with one another does neither. One that
    can't be asked (without a common number of rows, or where it raises) is no sum.

    Args:
        function: the user's own, or an object of the user's.
        prediction, target: a batch.
    """
    rows = _rows(prediction, target)
    if not rows:
        return False
    # Seven copies of a seventh of the batch take no more memory than the batch did.
    few = min(rows, max(2, rows // COPIES[-1]))

    def value(copies: int) -> float:
        def repeated(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
                return leaf
            some = leaf.detach()[:few]
            return torch.cat([some.float() if some.dtype in HALF_TYPES else some] * copies)

        result = function(map_leaves(repeated, prediction), map_leaves(repeated, target))
        return float(result)

    try:
        with undone(function), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _grows_evenly(value)
    except Exception:  # whatever a user's function may raise for some rows of a batch
        return False


def sums_over_samples(label: str) -> str:
    """Return the refusal of a loss that sums."""
    return (
        f"{label} sums over the samples of a batch, but fitkit's losses are means: parts of an "
        "update (accumulated batches, ranks) are weighed by their samples, so a sum would count "
        f"twice. {INSTEAD}"
    )


def sum_of_batches(label: str) -> str:
    """Return what to say of a loss that sums where batches of an evaluation are joined."""
    return (
        f"{label} sums over the samples of a batch. An evaluation's loss is the mean of its "
        f"batches' sums, so it depends on batch_size. {INSTEAD}"
    )


INSTEAD = "Divide it by the number of samples, or return its values before the sum, shape (N,)."


def _grows_evenly(value: Callable[[int], float]) -> bool:
    """Whether a value rises by the same amount with each further copy of the samples."""
    before = digest_of_random_state()
    first, again = value(COPIES[0]), value(COPIES[0])
    is_noisy = again != first or digest_of_random_state() != before
    # Equal random numbers for all copies: noise that has nothing to do with the samples cancels.
    draws = [_with_equal_numbers(value) for _ in range(DRAWS if is_noisy else 1)]
    few, some, many = (statistics.fmean(values) for values in zip(*draws, strict=True))
    tolerance = NOISY if is_noisy else SAME
    growth = some - few
    is_growing = abs(growth) > (COPIES[1] - COPIES[0]) * tolerance * abs(few)
    return is_growing and abs(many - some - growth) <= tolerance * abs(growth)


def _with_equal_numbers(value: Callable[[int], float]) -> list[float]:
    """Return the values for each number of copies, each computed with the same random numbers."""
    drawn = random_state()
    values = []
    for copies in COPIES:
        set_random_state(drawn)
        values.append(value(copies))
    return values


def _rows(prediction: Any, target: Any) -> int:
    """Return the rows of all tensors of a batch; 0 where they differ, or can't be copied."""
    found = [leaf for leaf in leaves((prediction, target)) if isinstance(leaf, torch.Tensor)]
    if not all(map(is_dense, found)):
        return 0
    counts = {len(leaf) for leaf in found if leaf.ndim}
    return counts.pop() if len(counts) == 1 else 0
