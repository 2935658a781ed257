"""What a step of the user's logs, where its batches are computed in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fitkit.seams.data import Batch
from fitkit.seams.steps import OwnStep, is_metric, joined_values


class Logs:
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
        self._of_batch: dict[str, list[tuple[Any, ...]]] = {}

    @contextlib.contextmanager
    def of(self, part: Batch, *, is_new: bool) -> Iterator[None]:
        """Surround a part's step, whose values count once the block has ended.

        Args:
            is_new: whether no earlier attempt has recorded the part.
        """
        context: Any = self.step.context
        compiled: Any = self.step.compiled
        self._of_part, measured = [], []
        before = [(one, one._copy_state_dict(), one._update_count) for one in self._metrics]
        record, batch = context.record, context.batch
        logged, record.logged = record.logged, self
        compiled.measure = lambda *given: measured.append(given)
        if batch is None or batch.data is not part.data:
            context.batch = part
        context.is_silent, counts = not is_new, False
        try:
            yield
            counts = is_new
        finally:
            record.logged, context.batch, context.is_silent = logged, batch, False
            del compiled.measure
            if not counts:
                for metric, state, count in before:
                    vars(metric).update(state)
                    metric._update_count, metric._computed = count, None
        for name, *note in self._of_part:
            self._of_batch.setdefault(name, []).append(tuple(note))
        with torch.no_grad():
            for given in measured:
                compiled.measure(*given)

    def add(self, *note: Any) -> None:
        """Take a value that a step logs."""
        self._of_part.append(note)

    def exchange(self, *ranks: Any, is_padding: bool = False) -> None:
        """Leave it to the batch's end: ranks may have other numbers of parts."""

    def end_batch(self) -> None:
        """Log a batch's values."""
        notes, self._of_batch = self._of_batch, {}
        logged = self.step.context.logged
        for name, of_parts in notes.items():
            value, options, samples, in_step = of_parts[0]
            if len(of_parts) > 1:
                values = [(value, samples) for value, _, samples, _ in of_parts]
                value, samples = joined_values(values, options.reduce_fx)
            logged.add(name, value, options, samples, in_step)
