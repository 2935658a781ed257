"""Updates whose batches are computed in parts where they don't fit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from fitkit.errors import OutOfMemoryError
from fitkit.extras.splitting.attempts import KeptBuffers, MovedGradients, copy_of, random_numbers
from fitkit.extras.splitting.cuts import Cuts
from fitkit.extras.splitting.pairs import WITHIN, JoinedLoss
from fitkit.extras.splitting.refusals import check_model, over_pairs
from fitkit.seams.data import Batch
from fitkit.seams.steps import Logbook, Outcome, OwnStep, Update, count_in, counter_of


class UpdateInParts(Update):
    """Makes updates, and computes a batch that doesn't fit in parts.

    A batch's forward and backward may be tried again. The update that follows isn't: half of one
    couldn't be undone.

    Args:
        model, step, given, options: `Update`'s.
    """

    def __init__(self, model: Any, step: Any, *given: Any, **options: Any) -> None:
        super().__init__(model, step, *given, **options)
        strategy = model._fitkit.compilation.strategy
        self._model, self._device = model, strategy.device
        self._logs = Logs(step) if isinstance(step, OwnStep) else None
        self._kept_buffers = KeptBuffers(model._fitkit.compilation.trained(model).modules())
        self._is_checked = False
        self._compares = JoinedLoss.can_compare(step)  # at the first cut
        self._joined: JoinedLoss | None = None  # of the batch
        self._at_begin: Any = None  # how the group weighed before the batch
        self._recorded = 0  # rows of the batch
        self._learns = False  # whether a part of it had a loss
        self.cuts: Cuts = Cuts(model, "fit", counter_of(model))

    def __call__(
        self, batch: Batch, index: int, record: Logbook, *, begins: bool = True, **optimizer: Any
    ) -> Outcome:
        """Learn from a batch, in as many parts as it takes."""
        if not self._is_checked:  # the modes of a training are set by now
            check_model(self._model, [self.optimizer])
            self._is_checked = True
        if begins:
            self.begin()
        earlier = MovedGradients(self._averaged) if self._batches else None
        random = random_numbers(self._device, all_libraries=self._logs is not None)
        self._kept_buffers.note()
        self._at_begin, self._recorded = copy_of(self._group), 0

        def compute(sizes: list[int]) -> Outcome:
            with self._around_step() if self.accumulate > 1 else nullcontext():
                return self._computed(batch, index, record, sizes, **optimizer)

        def undo() -> None:
            random()
            self._kept_buffers.restore()
            self._group = copy_of(self._at_begin)
            for parameter in self._averaged:
                parameter.grad = None

        try:
            outcome, sizes = self.cuts.tried(batch, compute, undo)
        except BaseException:
            if earlier is not None:
                earlier.put_back()
            raise
        if earlier is not None:
            earlier.add()
        if self._joined is not None:
            self._check_loss(self._joined)
        self.cuts.keep(batch, sizes)
        if self._group is not None:
            self._batches += self._learns
            if self._batches == self.accumulate:
                self.finish()
        elif self._learns:
            self._update()
        return outcome

    def _computed(
        self, batch: Batch, index: int, record: Logbook, sizes: list[int], **optimizer: Any
    ) -> Outcome:
        """Compute a batch's gradients in parts; return what the last part's step found."""
        is_part, self._learns = self.is_part or len(sizes) > 1, False
        joined = JoinedLoss(self.step) if self._compares and len(sizes) > 1 else None
        outcome: Outcome | None = None
        for part in self.cuts.parts_of(batch, sizes):
            is_new = part.end > self._recorded
            with nullcontext() if self._logs is None else self._logs.of(part.batch, is_new=is_new):
                outcome = self.step(part.batch, index, is_part=is_part, **optimizer)
                if joined is not None:
                    joined.take(outcome, part.batch.samples)
                if is_new:
                    self._recorded = part.end
                    self.step.record(part.batch, outcome, record)
            outcome.outputs = None
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
        if self._logs is not None:
            self._logs.exchange_batch(is_padding=batch.samples == 0)
        self._joined = joined
        assert outcome is not None
        return outcome

    def _check_loss(self, joined: JoinedLoss) -> None:
        """Refuse, after the first cut, a loss that can't be computed in parts."""
        self._compares, self._joined = False, None
        if (apart := joined.difference()) > WITHIN:
            raise OutOfMemoryError(over_pairs(apart))

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


class Logs:
    """What a step of the user's logs, each row of it once, however often it is computed.

    Args:
        step: the step.
    """

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        self._notes: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def of(self, part: Batch, *, is_new: bool) -> Iterator[None]:
        """Surround a part's step, whose values count once the block has ended.

        Args:
            is_new: whether no earlier attempt has recorded the part.
        """
        context: Any = self._step.context
        self._notes = []
        record, batch = context.record, context.batch
        logged, record.logged = record.logged, self
        context.batch, context.is_silent = part, not is_new
        try:
            yield
        finally:
            record.logged, context.batch, context.is_silent = logged, batch, False
        for given in self._notes:
            logged.add(*given)

    def add(self, *given: Any) -> None:
        """Take a value that a step logs."""
        self._notes.append(given)

    def exchange(self, *ranks: Any, is_padding: bool = False) -> None:
        """Leave it to the batch's end: ranks may have other numbers of parts."""

    def exchange_batch(self, *, is_padding: bool) -> None:
        """Exchange the values of a batch that the ranks share in each step.

        Ranks:
            Collective.
        """
        self._step.context.logged.exchange(self._step.ranks, is_padding=is_padding)
