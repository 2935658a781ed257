"""Steps that learn nothing, whose batches are computed in parts where they don't fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fitkit.errors import OutOfMemoryError
from fitkit.extras.lightning_base import ServedModel
from fitkit.extras.splitting.attempts import Before
from fitkit.extras.splitting.cuts import Cuts, Part
from fitkit.extras.splitting.halves import Join, apart
from fitkit.extras.splitting.joins import joined, joined_losses, joined_own
from fitkit.extras.splitting.logs import Logs
from fitkit.extras.splitting.refusals import not_its_halves, unjoinable
from fitkit.seams.data import Batch
from fitkit.seams.steps import CompiledStep, Outcome, OwnStep

VERBS = {"test": "evaluate", "validation": "a validation", "predict": "predict"}
"""What messages call a stage."""


class InParts:
    """Computes the batches of a pass that learns nothing, in parts where they don't fit.

    What it returns for a batch is what the whole batch would give. So nothing else knows of parts.

    Args:
        model: computes them.
        stage: what is done.
        join: makes a batch's outcome of those of its parts.
        of_user: whether the steps are the user's code.
    """

    def __init__(self, model: Any, stage: str, join: Join, *, of_user: bool) -> None:
        self._model, self._join = model, join
        self._cuts = Cuts(model, VERBS[stage])
        self._before = Before(model, of_user=of_user)

    def __call__(
        self, batch: Batch, compute: Callable[[Part], Outcome], look: Callable[[Batch], Outcome]
    ) -> Outcome:
        """Return what a batch gives.

        Args:
            compute: computes a part.
            look: computes some rows, and leaves no trace in records.

        Raises:
            OutOfMemoryError: it doesn't fit, and parts would give something else.
        """
        before = self._before
        before.note(batch)

        def attempt(sizes: list[int]) -> list[Outcome]:
            return [compute(part) for part in self._cuts.parts_of(batch, sizes)]

        found, sizes = self._cuts.tried(batch, attempt, before.restore)
        if not before.is_known:
            before.end_batch(batch)
        if len(sizes) == 1:
            return found[0]
        try:
            made = self._join(found, sizes)
        except (ValueError, RuntimeError) as error:
            raise OutOfMemoryError(unjoinable(error)) from error
        if self._cuts.keep(batch, sizes):
            given = self._model, self._cuts, batch, sizes, before.buffers
            if (far := apart(*given, look, self._join)) is not None:
                raise OutOfMemoryError(not_its_halves(far))
        return made


class StepInParts(CompiledStep):
    """Computes batches by the compiled loss, and in parts where they don't fit.

    Args:
        stage, model: what is done, by which model.
        given, options: `CompiledStep`'s.
    """

    def __init__(self, stage: str, model: Any, *given: Any, **options: Any) -> None:
        super().__init__(model, *given, **options)
        self._in_parts = InParts(model, stage, joined, of_user=False)

    def __call__(self, batch: Batch, index: int = 0, *, is_part: bool = False) -> Outcome:
        """Return what the net and the loss give for a batch."""
        whole = super().__call__

        def compute(part: Part) -> Outcome:
            return whole(part.batch, index, is_part=is_part)

        return self._in_parts(batch, compute, whole)

    def joining_losses(self, first: Batch) -> None:
        """Return None: each batch is computed by itself, so that it can be cut."""


class OwnStepInParts(OwnStep):
    """Computes batches by a model's own steps that learn nothing, in parts where they don't fit.

    What the steps log is one value for each batch, and what they return is as of the batch.

    Args:
        model, stage, given: `OwnStep`'s.
    """

    def __init__(self, model: Any, stage: str, *given: Any) -> None:
        super().__init__(model, stage, *given)
        self._logs = Logs(self)
        hook = f"on_{stage}_batch_end"  # of a LightningModule, which sees what its step returned
        self._hooks: Any = None
        if isinstance(model, ServedModel) and model.hooks.has(hook):
            self._hooks = model.hooks
        is_read = self.keeps or not self._has_loss or self._hooks is not None
        join = joined_own if is_read else joined_losses
        self._in_parts = InParts(model, stage, join, of_user=True)

    def __call__(
        self, batch: Batch, index: int = 0, optimizer_idx: int = 0, *, is_part: bool = False
    ) -> Outcome:
        """Return what the model's step gives for a batch."""
        whole, recorded = super().__call__, 0

        def rows(part: Batch, *, is_new: bool) -> Outcome:
            with self._logs.of(part, is_new=is_new):
                found = whole(part, index, optimizer_idx, is_part=is_part)
            if self._hooks is not None:
                found.outputs = self._hooks.outputs
            return found

        def compute(part: Part) -> Outcome:
            nonlocal recorded
            found = rows(part.batch, is_new=part.end > recorded)
            recorded = max(recorded, part.end)
            return found

        found = self._in_parts(batch, compute, lambda part: rows(part, is_new=False))
        self._logs.end_batch()
        if self._hooks is not None:
            self._hooks.outputs = found.outputs
            found.outputs = None if self._has_loss else found.outputs
        return found
