"""What a batch holds: inputs, targets, sample weights."""

from __future__ import annotations

from typing import Any

import torch

from fitkit import trees
from fitkit.errors import ConfigurationError


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """The inputs, targets and sample weights of a batch; None for what it doesn't have.

    Args:
        batch: `(x, y)`, `(x, y, sample_weight)`, `(x,)` as a tuple or list; anything else
            (a tensor, a dict) is the inputs as a whole.

    Raises:
        ConfigurationError: a tuple or list of another length.
    """
    if isinstance(batch, (tuple, list)):
        count = len(batch)
        if count == 2:
            return batch[0], batch[1], None
        if count == 3:
            return batch[0], batch[1], batch[2]
        if count == 1:
            return batch[0], None, None
        raise ConfigurationError(
            f"A batch is a {type(batch).__name__} of {count} entries. A batch is (x, y) or "
            "(x, y, sample_weight); put several inputs into one tuple or dict: ((a, b), y)."
        )
    return batch, None, None


def samples_in(x: Any, y: Any) -> int:
    """The number of samples in a batch: its targets', where there are any."""
    if isinstance(y, torch.Tensor) and y.ndim:
        return y.shape[0]
    return trees.sample_count(x if y is None else y)


def samples_of(batch: Any) -> int:
    """The number of samples in a batch that isn't taken apart yet; it may have any structure."""
    if isinstance(batch, (tuple, list)) and len(batch) not in (1, 2, 3):
        return trees.sample_count(batch)
    x, y, _ = unpack(batch)
    return samples_in(x, y)
