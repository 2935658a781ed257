"""What a batch gives, from what its parts give."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fitkit import trees
from fitkit.seams.losses import total_of
from fitkit.seams.steps import Outcome


def joined(found: list[Outcome], sizes: list[int]) -> Outcome:
    """Return the outcome of a batch, from those of its parts.

    Args:
        sizes: the parts' rows.
    """
    whole = [_rows([getattr(one, name) for one in found], sizes) for name in ROWS]
    made = joined_losses(found, sizes)
    made.outputs, made.target, made.weight = whole
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


ROWS = ("outputs", "target", "weight")
"""What an outcome has a row of for each sample."""


def _rows(parts: list[Any], sizes: list[int]) -> Any:
    return None if parts[0] is None else trees.concatenate(parts, sizes)


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
