"""What a batch gives, from what its parts give."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.seams.batches import kind_of
from fitkit.seams.losses import total_of
from fitkit.seams.steps import Outcome, loss_in


def joined(found: list[Outcome], sizes: list[int]) -> Outcome:
    """Return the outcome of a batch, from those of its parts.

    Args:
        sizes: the parts' rows.

    Raises:
        ValueError, RuntimeError: outputs that can't be joined.
    """
    made = joined_losses(found, sizes)
    made.outputs, made.target, made.weight = (
        as_one([getattr(one, name) for one in found], sizes) for name in ROWS
    )
    return made


ROWS = ("outputs", "target", "weight")
"""What an outcome has a row of for each sample."""


def joined_own(found: list[Outcome], sizes: list[int]) -> Outcome:
    """Return the outcome of a batch that a step of the user's has computed in parts.

    Args:
        sizes: the parts' rows.

    Raises:
        ValueError, RuntimeError: the step returned what can't be joined.
    """
    made, outputs = joined_losses(found, sizes), [one.outputs for one in found]
    first, loss = outputs[0], made.loss
    if loss is None:
        made.outputs = as_one(outputs, sizes)
        return made
    if getattr(loss_in(first), "ndim", 0) and max(sizes) == 1:
        raise ValueError("a tensor of one number may be a loss or a row")
    if not isinstance(first, Mapping):
        made.outputs = loss if isinstance(first, torch.Tensor) else as_one(outputs, sizes)
        return made
    known = {"loss": loss} if found[0].count is None else {"loss": loss, "count": made.count}
    others = [{key: one[key] for key in one if key not in known} for one in outputs]
    whole = {**as_one(others, sizes), **known}
    made.outputs = trees.rebuilt(first, [whole[key] for key in first])
    return made


def joined_losses(found: list[Outcome], sizes: list[int]) -> Outcome:
    """Return the losses of a batch, from those of its parts.

    Args:
        sizes: the parts' rows.
    """
    loss, count = mean_of([(one.loss, one.count) for one in found], sizes)
    terms = []
    for parts in zip(*(one.terms for one in found), strict=True):
        value, counted = mean_of([(term.value, term.count) for term in parts], sizes)
        terms.append(dataclasses.replace(parts[0], value=value, count=counted))
    if terms:
        loss, count = total_of(terms), None
    return Outcome(loss, count, terms)


def mean_of(parts: list[tuple[Any, Any]], sizes: list[int]) -> tuple[Any, Any]:
    """Return the mean of some parts' means, and what it is over; None for samples."""
    if parts[0][0] is None:
        return None, None
    counts = [
        size if count is None else count for (_, count), size in zip(parts, sizes, strict=True)
    ]
    total = sum(counts)
    value = sum(
        torch.where(torch.as_tensor(count, device=mean.device) > 0, mean * count, 0.0)
        for (mean, _), count in zip(parts, counts, strict=True)
    )
    return value / total, None if all(count is None for _, count in parts) else total


def as_one(parts: list[Any], sizes: list[int]) -> Any:
    """Return what a batch gives, from what its parts give: trees of one structure.

    Rows are joined end to end. Other floating-point numbers are taken for means over rows, and
    the rest must be the same in each part.

    Args:
        sizes: the parts' rows.

    Raises:
        ValueError, RuntimeError: it can't be joined.
    """
    first = parts[0]
    if len({type(one) for one in parts}) > 1:
        raise ValueError("its parts are of unlike types")
    if kind_of(first) is not None or (
        isinstance(first, list) and trees.are_of_samples(parts, sizes)
    ):
        return trees.concatenate(parts, sizes)
    if isinstance(first, (torch.Tensor, np.ndarray)):
        pairs = list(zip(parts, sizes, strict=True))
        if all(one.ndim and len(one) == size for one, size in pairs):
            return torch.cat(parts) if isinstance(first, torch.Tensor) else np.concatenate(parts)
        if any(one.shape != first.shape for one in parts):
            raise ValueError(f"shapes such as {tuple(first.shape)} differ beyond rows")
        if torch.as_tensor(first).is_floating_point():
            return _mean(parts, sizes)
        is_same = all(bool((one == first).all()) for one in parts)
    elif trees.is_container(first):
        if any(trees.places(one) != trees.places(first) for one in parts):
            raise ValueError("its parts have unlike entries")
        columns = zip(*map(trees.children, parts), strict=True)
        return trees.rebuilt(first, [as_one(list(column), sizes) for column in columns])
    elif isinstance(first, float):
        return _mean(parts, sizes)
    else:
        is_same = all(one is first or one == first for one in parts)
    may_count = isinstance(first, (int, torch.Tensor, np.ndarray)) and max(sizes) == 1
    if not is_same or may_count:  # the halves of one row can't show it
        raise ValueError(f"{type(first).__name__} values that aren't rows may be counts")
    return first


def _mean(parts: list[Any], sizes: list[int]) -> Any:
    rows = sum(sizes)
    return sum(one * (size / rows) for one, size in zip(parts, sizes, strict=True))
