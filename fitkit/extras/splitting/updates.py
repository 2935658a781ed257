"""Updates whose batches are computed in parts where they don't fit."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import torch

from fitkit import trees
from fitkit.errors import OutOfMemoryError
from fitkit.extras.splitting.attempts import Before, MovedGradients, copy_of
from fitkit.extras.splitting.cuts import Cuts, Part
from fitkit.extras.splitting.halves import apart
from fitkit.extras.splitting.joins import joined_losses, joined_own
from fitkit.extras.splitting.logs import Logs
from fitkit.extras.splitting.pairs import WITHIN, JoinedLoss
from fitkit.extras.splitting.refusals import (
    check_layers,
    check_updates,
    not_a_mean,
    not_its_halves,
    over_pairs,
    unjoinable,
)
from fitkit.seams.data import Batch
from fitkit.seams.steps import Logbook, Outcome, OwnStep, Update, count_in, without_gradients

AS_IS = contextlib.nullcontext()
"""What surrounds a step where nothing has to."""


class UpdateInParts(Update):
    """Makes updates, and computes a batch that doesn't fit in parts.

    A batch's forward and backward may be tried again. The update that follows isn't: half of one
    couldn't be undone.

    Args:
        model, step, given, options: `Update`'s.
    """

    def __init__(self, model: Any, step: Any, *given: Any, **options: Any) -> None:
        super().__init__(model, step, *given, **options)
        check_updates(model, self.optimizer)
        self._model = model
        self._logs = Logs(step) if isinstance(step, OwnStep) else None
        self._before = Before(model, of_user=self._logs is not None)
        self._is_checked = False
        self._compares = JoinedLoss.can_compare(step)  # at the first cut
        self._joined: JoinedLoss | None = None  # of the batch
        self._at_begin: Any = None  # how the group weighed before the batch
        self._recorded = 0  # rows of the batch
        self._held: list[tuple[Part, Outcome]] = []  # of the attempt: what a guard must admit
        self._returned: list[tuple[int, Outcome]] | None = None  # of the parts, if anyone reads it
        self._learns = False  # whether a part of it had a loss
        self.cuts: Cuts = Cuts(model, "fit")

    def __call__(
        self, batch: Batch, index: int, record: Logbook, *, begins: bool = True, **optimizer: Any
    ) -> Outcome:
        """Learn from a batch, in as many parts as it takes."""
        if not self._is_checked:  # the modes of a training are set by now
            check_layers(self._model)
            self._is_checked = True
        if begins:
            self.begin()
        earlier = MovedGradients(self._averaged) if self._batches else None
        self._before.note(batch)
        self._at_begin = None if self._group is None else copy_of(self._group)
        self._recorded = 0
        self._returned = None if record.outputs is None else []
        compute = partial(self._computed, batch, index, record, optimizer)
        try:
            outcome, sizes = self.cuts.tried(batch, compute, self._undo)
        except BaseException:
            if earlier is not None:
                earlier.put_back()
            raise
        if earlier is not None:
            earlier.add()
        if not self._before.is_known:
            self._before.end_batch(batch)
        if len(sizes) > 1:
            if self._joined is not None:
                self._check_loss(self._joined)
            if self.cuts.keep(batch, sizes):
                self._check_halves(batch, index, sizes, optimizer)
        if self._held:
            self._record_held(batch, outcome, record)
        if self._returned is not None and len(self._returned) > 1:
            self._join_returned(self._returned, record)
        if self._logs is not None:
            self._logs.end_batch()
            record.logged.exchange(self._logs.step.ranks, is_padding=batch.samples == 0)
        if self.is_part or self._group is not None:
            self._count()
        elif self._learns:
            self._update()
        return outcome

    def _undo(self, batch: Batch) -> None:
        """Let a failed attempt have changed nothing."""
        self._before.restore(batch)
        self._group = copy_of(self._at_begin)
        for parameter in self._averaged:
            parameter.grad = None

    def _computed(
        self, batch: Batch, index: int, record: Logbook, optimizer: dict[str, Any], sizes: list[int]
    ) -> Outcome:
        """Compute a batch's gradients in parts; return what the steps found, as of the batch."""
        with self._around_step() if self.accumulate > 1 else AS_IS:
            is_part, self._learns = self.is_part or len(sizes) > 1, False
            joined = JoinedLoss(self.step) if self._compares and len(sizes) > 1 else None
            found: list[Outcome] = []
            self._held = []
            for part in self.cuts.parts_of(batch, sizes):
                is_new = part.end > self._recorded
                with self._logged(part.batch, is_new=is_new):
                    outcome = self.step(part.batch, index, is_part=is_part, **optimizer)
                    if joined is not None:
                        joined.take(outcome, part.batch.samples)
                    if self._fit_state.guard is not None:
                        self._held.append((part, without_graph(outcome)))
                    elif is_new:
                        self._record(part, outcome, record)
                    self._recorded = max(self._recorded, part.end)
                outcome.outputs = None
                found.append(outcome if len(sizes) == 1 else without_graph(outcome))
                if outcome.loss is None:
                    self.check_alone()
                    continue
                self._learns = True
                if not is_part:
                    self._add_gradients(outcome.loss, count_in(batch, outcome.count))
                    continue
                if self._group is None:
                    self._begin_group(batch, outcome, is_cut=len(sizes) > 1)
                assert self._group is not None
                self._add_gradients(*self._group.part(part.batch, outcome))
        self._joined = joined
        return found[0] if len(found) == 1 else joined_losses(found, sizes)

    def _logged(self, part: Batch, *, is_new: bool) -> contextlib.AbstractContextManager[Any]:
        """Surround a part's step: what a step of the user's logs counts once for each row."""
        return AS_IS if self._logs is None else self._logs.of(part, is_new=is_new)

    def _record(self, part: Part, outcome: Outcome, record: Logbook) -> None:
        self.step.record(part.batch, outcome, record)
        if self._returned is not None and part.batch.samples:
            self._returned.append((part.end - part.first, without_graph(outcome)))

    def _record_held(self, batch: Batch, outcome: Outcome, record: Logbook) -> None:
        """Record what waited for a guard, which looks at whole batches."""
        held, self._held = self._held, []
        guard = self._fit_state.guard
        if not held or guard is None or not guard.counts(self.optimizer, batch, outcome):
            return
        for part, of_part in held:
            with self._logged(part.batch, is_new=True):
                self._record(part, of_part, record)

    def _join_returned(self, returned: list[tuple[int, Outcome]], record: Logbook) -> None:
        """Let `training_epoch_end` get one output for the batch, as if it were whole."""
        sizes, found = [size for size, _ in returned], [outcome for _, outcome in returned]
        assert record.outputs is not None
        try:
            outputs = joined_own(found, sizes).outputs
        except (ValueError, RuntimeError) as error:
            raise OutOfMemoryError(unjoinable(error)) from error
        record.outputs[-len(found) :] = [without_gradients(outputs, training=True)]

    def _check_loss(self, joined: JoinedLoss) -> None:
        """Refuse, after the first cut, a loss that can't be computed in parts."""
        self._compares, self._joined = False, None
        if (apart := joined.difference()) > WITHIN:
            raise OutOfMemoryError(over_pairs(apart))

    def _check_halves(
        self, batch: Batch, index: int, sizes: list[int], optimizer: dict[str, Any]
    ) -> None:
        """Refuse, at the first cut of batches of some shapes, steps that parts would change."""

        def compute(part: Batch) -> Outcome:
            with self._logged(part, is_new=False):
                return without_graph(self.step(part, index, is_part=True, **optimizer))

        given = self._model, self.cuts, batch, sizes, self._before.buffers
        is_read = self._returned is not None
        found = apart(*given, compute, joined_own if is_read else joined_losses)
        if found is not None:
            is_own = self._logs is not None
            raise OutOfMemoryError(
                not_its_halves(found) if is_read else not_a_mean(found, is_own=is_own)
            )

    def _begin_group(self, batch: Batch, outcome: Outcome, *, is_cut: bool) -> None:
        """Choose how the parts of a group weigh, once, however often its first batch is tried.

        Ranks:
            Collective, as for a batch that is computed whole.
        """
        if is_cut and outcome.counts_apart:
            counts = self.step.counts_of(batch)
            terms = [
                dataclasses.replace(term, count=count)
                for term, count in zip(outcome.terms, counts, strict=True)
            ]
            outcome = dataclasses.replace(outcome, terms=terms)
        self._group = self._weighing(batch, outcome)
        self._at_begin = copy_of(self._group)


def without_graph(outcome: Outcome) -> Outcome:
    """Return what a step found, as values alone."""
    loss = None if outcome.loss is None else outcome.loss.detach()
    terms = [dataclasses.replace(term, value=term.value.detach()) for term in outcome.terms]
    outputs = trees.map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outcome.outputs
    )
    return dataclasses.replace(outcome, loss=loss, terms=terms, outputs=outputs)
