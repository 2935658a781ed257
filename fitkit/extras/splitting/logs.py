"""What a step of the user's logs, where its batches are computed in parts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fitkit.seams.data import Batch
from fitkit.seams.steps import OwnStep, is_metric, joined_values


class Logs(contextlib.AbstractContextManager[None]):
    """What a step of the user's logs, each row of it once, however often it is computed.

    A name's values of a batch's parts are one value, which enters the records at the batch's end.

    Args:
        step: the step.

    Attributes:
        step: as given.
    """

    def __init__(self, step: OwnStep) -> None:
        self.step: OwnStep = step
        self._metrics: list[Any] = [one for one in step.model.modules() if is_metric(one)]
        self._of_part: list[tuple[Any, ...]] = []
        self._measured: list[tuple[Any, ...]] = []
        self._of_batch: dict[str, list[tuple[Any, ...]]] = {}

    def of(self, part: Batch, *, is_new: bool) -> Logs:
        """Surround a part's step, whose values count once the block has ended.

        Args:
            is_new: whether no earlier attempt has recorded the part.
        """
        self._part, self._is_new = part, is_new
        return self

    def __enter__(self) -> None:
        context = self._context = self.step.context
        compiled: Any = self.step.compiled
        record, batch = context.record, context.batch
        self._of_part, self._measured = [], []
        self._before = [(one, one._copy_state_dict(), one._update_count) for one in self._metrics]
        self._outside = record.logged, batch
        record.logged = self  # type: ignore[assignment]
        compiled.measure = self._measure
        if batch is None or batch.data is not self._part.data:
            context.batch = self._part
        context.is_silent = not self._is_new

    def __exit__(self, *error: object) -> None:
        context, compiled = self._context, self.step.compiled
        context.record.logged, context.batch = self._outside
        context.is_silent = False
        del compiled.measure
        if not self._is_new or error[0] is not None:
            for metric, state, count in self._before:
                vars(metric).update(state)
                metric._update_count, metric._computed = count, None
        if error[0] is not None:
            return
        for name, *note in self._of_part:
            self._of_batch.setdefault(name, []).append(tuple(note))
        for given in self._measured:
            with torch.no_grad():
                compiled.measure(*given)

    def _measure(self, *given: Any) -> None:
        """Take what the compiled metrics measure."""
        self._measured.append(given)

    def add(self, *note: Any) -> None:
        """Take a value that a step logs."""
        self._of_part.append(note)

    def exchange(self, *ranks: Any, is_padding: bool = False) -> None:
        """Leave it to the batch's end: ranks may have other numbers of parts."""

    def end_batch(self) -> None:
        """Log a batch's values."""
        if not self._of_batch:
            return
        notes, self._of_batch = self._of_batch, {}
        logged = self.step.context.logged
        for name, of_parts in notes.items():
            value, options, samples, in_step = of_parts[0]
            if len(of_parts) > 1:
                values = [(value, samples) for value, _, samples, _ in of_parts]
                value, samples = joined_values(values, options.reduce_fx)
            logged.add(name, value, options, samples, in_step)
