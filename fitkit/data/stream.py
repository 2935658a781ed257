"""The batches of one epoch after another, from a source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fitkit.data.sources import Source
from fitkit.errors import ConfigurationError


class Stream:
    """Cuts a source into epochs.

    Without `steps` an epoch is one pass over the source. With it an epoch is that many
    batches: the next epoch goes on where the last one stopped, and a source that can be read
    again starts anew in the middle of an epoch where it ends.

    Args:
        source: where the batches come from.
        steps: batches in an epoch; None for one pass.
        first: the number of the first pass; shuffling follows from it.
    """

    def __init__(self, source: Source, steps: int | None = None, first: int = 0) -> None:
        self.source = source
        self.steps = source.steps if steps is None else steps
        self._limit = steps
        self._number = first
        # No reference back to this stream: a ring would keep a loader's workers alive.
        self._endless = _passes(source, first) if steps is not None else iter(())

    def epoch(self) -> Iterator[Any]:
        """The next epoch's batches."""
        if self._limit is not None:
            return itertools.islice(self._endless, self._limit)
        number = self._number
        self._number += 1
        return self.source.batches(number)


def _passes(source: Source, first: int) -> Iterator[Any]:
    """Pass after pass, until the source gives nothing or can't be read again."""
    for number in itertools.count(first):
        count = 0
        for batch in source.batches(number):
            count += 1
            yield batch
        if not source.repeatable or count == 0:
            return


def limited(source: Source, steps: int | None) -> Iterator[Any]:
    """The first `steps` batches of a new pass (all, where None); nothing more is read."""
    batches = source.batches(0)
    return batches if steps is None else itertools.islice(batches, steps)


def check_readable(source: Source, epochs: int, steps: int | None, name: str = "x") -> None:
    """Refuse a one-pass iterator where several passes would be needed.

    Raises:
        ConfigurationError: with what to give instead.
    """
    if epochs > 1 and steps is None and not source.repeatable:
        argument = "steps_per_epoch" if name == "x" else "validation_steps"
        raise ConfigurationError(
            f"{name} is an iterator, which can be read once, but epochs={epochs} needs it "
            f"{epochs} times. Give {argument}=… to cut one long stream into epochs, or "
            "something that can be read again (a list of batches, a DataLoader, a Dataset)."
        )
