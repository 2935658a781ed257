"""What a batch holds (inputs, targets, sample weights), and what all sources of batches have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.errors import ConfigurationError, warn

COLLATE_ERRORS = {
    r"can't convert np\.ndarray of type numpy\.c?longdouble": (
        "hold long doubles, which torch doesn't have. Write .astype('float64') ('complex128')"
    ),
    r"sparse tensors are not currently supported by the default collate_fn": (
        "hold sparse tensors, which torch's default collate_fn can't join. Write .to_dense()"
    ),
    r"found <class 'scipy\.sparse": (
        "hold sparse matrices of scipy, which torch's default collate_fn can't join. Write "
        ".toarray()"
    ),
}
"""What torch says of samples that it can't join, and what to say instead."""


class NoRows:
    """Stands, itself, for a batch without rows: it keeps its place, and nothing is computed of it.

    A class, because that stays the same object where it is sent to another process.
    """


class Source:
    """Gives batches, pass after pass.

    Attributes:
        samples: in one pass; None where unknown.
        batch_size: None where unknown.
        steps: batches in one pass; None where unknown.
        repeatable: whether a second pass starts from the beginning.
        target: all targets as a tree of tensors, where they are in memory.
        own_state: follows the state that a loader keeps by itself (`OwnState`); None elsewhere.
        generators: random generators of the data's own, which their order may follow from.
        whole: all ranks' data, where this is a rank's shard of them; else the source itself.
    """

    samples: int | None = None
    batch_size: int | None = None
    steps: int | None = None
    repeatable = True
    own_state: Any = None

    @property
    def target(self) -> Any:
        return None

    @property
    def generators(self) -> list[torch.Generator]:
        return []

    @property
    def whole(self) -> Any:
        return self

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        """The batches of pass `number`, without the first `skip`; they aren't loaded if avoidable.

        `NoRows` stands for each that has no rows. It counts among those to skip.

        What has been drawn when this returns is all that a pass draws before its first batch.
        """
        raise NotImplementedError


def marked(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, with `NoRows` for each that has none (an empty shard, a filter's leavings).

    Raises:
        ConfigurationError: samples of a kind that torch's collate doesn't join.
    """
    try:
        for batch in batches:
            yield NoRows if is_empty(batch) else batch
    except (TypeError, RuntimeError) as error:
        for pattern, explanation in COLLATE_ERRORS.items():
            if re.search(pattern, str(error)):
                raise ConfigurationError(
                    f"The data's samples {explanation} in the Dataset, or give a DataLoader with a "
                    "collate_fn of its own."
                ) from error
        raise


def is_empty(batch: Any) -> bool:
    """Whether all arrays of a batch have 0 rows.

    All of them: an image in which nothing is to be found has targets of 0 rows, too.
    """
    found = False
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    for part in parts:  # the first one tells it of most batches, without a walk over a tree
        for leaf in (part,) if isinstance(part, torch.Tensor) else trees.leaves(part):
            if isinstance(leaf, (torch.Tensor, np.ndarray)):
                # A nested tensor has rows, but no shape.
                if getattr(leaf, "is_nested", False) or (leaf.ndim and leaf.shape[0]):
                    return False
                found = found or leaf.ndim > 0
    return found


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


def check_weights(weight: Any, what: str) -> None:
    """Refuse sample weights that are negative or not finite; reads the values.

    Args:
        weight: a tree of tensors; other leaves pass.
        what: how the caller names them, for the message.

    Raises:
        ConfigurationError: with a wrong one.
    """
    for tensor in trees.tensors(weight):
        if tensor.numel() == 0 or tensor.is_complex():
            continue
        wrong = ~((tensor >= 0) & (tensor != float("inf")))
        if bool(wrong.any()):
            raise ConfigurationError(
                f"{what} holds {tensor[wrong][0].item():g}, but a weight is a finite number from 0."
            )


def warn_of_second_target(y: Any, weight: Any) -> None:
    """Say where a batch's third entry looks like a second target rather than weights."""
    if not isinstance(y, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return
    is_number = weight.is_floating_point() or weight.dtype is torch.bool
    looks_like_labels = not is_number and weight.numel() > 0 and bool((weight > 1).any())
    has_several = weight.ndim > 1 and weight.numel() > weight.shape[0]
    if looks_like_labels or (has_several and y.is_floating_point() and weight.shape == y.shape):
        warn(
            f"The third entry of the batches, of shape {tuple(weight.shape)} and type "
            f"{str(weight.dtype).removeprefix('torch.')}, is taken as sample weights. If it is a "
            "second target, write (x, (y, y2))."
        )
