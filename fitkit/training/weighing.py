"""What the parts of an update weigh, so that it is the update of all of them as one batch."""

from __future__ import annotations

import torch

from fitkit.data.batches import Batch
from fitkit.losses import Count


def count_in(batch: Batch, count: Count) -> float | torch.Tensor:
    """Return what a loss counts for: what it is the mean over, and nothing in a batch that only
    fills.
    """
    return batch.samples if count is None or not batch.samples else count


def nothing_if(loss: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
    """Return a part's loss; 0 if it is the mean over nothing, which is NaN."""
    if isinstance(count, torch.Tensor):
        return torch.where(count > 0, loss, torch.zeros_like(loss))
    return loss if count else loss.nan_to_num(0.0, 0.0, 0.0)
