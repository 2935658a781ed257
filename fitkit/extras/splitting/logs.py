"""What a step of the user's logs, where its batches are computed in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fitkit.seams.data import Batch
from fitkit.seams.steps import OwnStep, is_metric, joined_values


class Logs:
    """What a step of the user's logs, each row of it once, however often it is computed.

    A name's values of a batch's parts are one value, which enters the records at the batch's end.

    Args:
        step: the step.
    """

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        self._metrics: list[Any] = [one for one in step.model.modules() if is_metric(one)]
        self._of_part: list[tuple[Any, ...]] = []
        self._of_batch: dict[str, list[tuple[Any, ...]]] = {}

    @contextlib.contextmanager
    def of(self, part: Batch, *, is_new: bool) -> Iterator[None]:
        """Surround a part's step, whose values count once the block has ended.

        Args:
            is_new: whether no earlier attempt has recorded the part.
        """
        context: Any = self._step.context
        self._of_part = []
        before = [(one, one._copy_state_dict(), one._update_count) for one in self._metrics]
        record, batch = context.record, context.batch
        logged, record.logged = record.logged, self
        context.batch, context.is_silent = part, not is_new
        try:
            yield
        except BaseException:
            for metric, state, count in before:
                vars(metric).update(state)
                metric._update_count, metric._computed = count, None
            raise
        finally:
            record.logged, context.batch, context.is_silent = logged, batch, False
        for name, *note in self._of_part:
            self._of_batch.setdefault(name, []).append(tuple(note))

    def add(self, *note: Any) -> None:
        """Take a value that a step logs."""
        self._of_part.append(note)

    def exchange(self, *ranks: Any, is_padding: bool = False) -> None:
        """Leave it to the batch's end: ranks may have other numbers of parts."""

    def end_batch(self, *, is_padding: bool) -> None:
        """Log a batch's values, and exchange those that the ranks share in each step.

        Ranks:
            Collective.
        """
        notes, self._of_batch = self._of_batch, {}
        logged = self._step.context.logged
        for name, of_parts in notes.items():
            value, options, samples, in_step = of_parts[0]
            if len(of_parts) > 1:
                values = [(value, samples) for value, _, samples, _ in of_parts]
                value, samples = joined_values(values, options.reduce_fx)
            logged.add(name, value, options, samples, in_step)
        logged.exchange(self._step.ranks, is_padding=is_padding)
