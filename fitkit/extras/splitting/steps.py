"""Steps that learn nothing, whose batches are computed in parts where they don't fit."""

from __future__ import annotations

from typing import Any

from fitkit.extras.splitting.cuts import Cuts
from fitkit.extras.splitting.joins import joined
from fitkit.seams.data import Batch
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
