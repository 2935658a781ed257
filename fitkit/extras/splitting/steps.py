"""Steps that learn nothing, whose batches are computed in parts where they don't fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fitkit import trees
from fitkit.extras.splitting.cuts import Cuts
from fitkit.seams.data import Batch
from fitkit.seams.losses import total_of
from fitkit.seams.steps import CompiledStep, Outcome

VERBS = {"test": "evaluate", "validation": "a validation", "predict": "predict"}
"""What messages call a stage."""


class StepInParts(CompiledStep):
    """Computes batches by the compiled loss, and in parts where they don't fit.

    What it returns for a batch is what the whole batch would give. So nothing else knows of parts.

    Args:
        stage, model: what is done, by which model.
        given, options: `CompiledStep`'s.
    """

    def __init__(self, stage: str, model: Any, *given: Any, **options: Any) -> None:
        super().__init__(model, *given, **options)
        self._cuts = Cuts(model, VERBS[stage])

    def __call__(self, batch: Batch, index: int = 0, *, is_part: bool = False) -> Outcome:
        """Return what the net and the loss give for a batch."""
        whole = super().__call__

        batch.is_lent = True  # each attempt computes what it holds, whatever the net writes into it

        def compute(sizes: list[int]) -> list[Outcome]:
            parts = self._cuts.parts_of(batch, sizes)
            return [whole(part.batch, index, is_part=is_part) for part in parts]

        found, sizes = self._cuts.tried(batch, compute)
        if len(sizes) == 1:
            return found[0]
        self._cuts.keep(batch, sizes)
        return joined(found, sizes)

    def joining_losses(self, first: Batch) -> None:
        """Return None: each batch is computed by itself, so that it can be cut."""


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
