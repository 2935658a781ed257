"""The batches of one epoch after another, from a source."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fitkit.data.batches import NoRows, Source
from fitkit.errors import ConfigurationError
from fitkit.random_states import random_state, set_random_state


@dataclasses.dataclass
class Position:
    """Where in the data a training is.

    Attributes:
        number: of the pass over the data, from 0.
        batches: how many of its batches are done, over all ranks.
        began: the random state when the pass began (plain data).
    """

    number: int = 0
    batches: int = 0
    began: dict[str, Any] | None = None


class Stream:
    """Cuts a source into epochs.

    Without `steps` an epoch is one pass over the source. With it an epoch is that many
    batches, of which some may have no rows: the next epoch goes on where the last one stopped,
    and a source that can be read again starts anew in the middle of an epoch where it ends.

    Args:
        source: where the batches come from.
        steps: batches in an epoch; None for one pass.
        first: the number of the first pass; shuffling follows from it.
        ranks: how many batches of the whole a step takes.

    Attributes:
        position: where it is; with `steps` counted here, else by `note`.
    """

    def __init__(
        self, source: Source, steps: int | None = None, first: int = 0, ranks: int = 1
    ) -> None:
        self.source = source
        self.steps = source.steps if steps is None else steps
        self.position = Position(first)
        self._limit = steps
        self._ranks = ranks
        # No reference back to this stream: a ring would keep a loader's workers alive.
        self._endless = _passes(source, self.position, ranks) if steps is not None else iter(())
        self._epochs = 0

    def epoch(self, done: int = 0) -> Iterator[Any]:
        """The next epoch's batches.

        Args:
            done: steps of it that were made before the training was cut.
        """
        if self._limit is not None:
            return itertools.islice(self._endless, self._limit - done)
        if self._epochs:
            self.position.number += 1
            self.position.batches = 0
        self._epochs += 1
        return _begin(self.source, self.position)

    def note(self, steps: int) -> None:
        """Take note of how many of the epoch's steps are done."""
        if self._limit is None:
            self.position.batches = steps * self._ranks

    def look(self) -> Any:
        """A batch, which is given again when its turn comes; None where there is none.

        Ranks:
            Collective.
        """
        whole, own = self.source.whole, self.source.own_state
        waiting = own.state(ends_pass=False) if own is not None and own.waits else None
        drawn, rest = random_state(self.generators), None
        if not whole.repeatable:
            whole.iterable, rest = itertools.tee(whole.iterable)
        batch = self._first_with_rows()
        if batch is None and waiting is not None:  # the loader's own state is at its pass's end
            batch = self._first_with_rows()
        if rest is not None:
            whole.iterable = rest
        set_random_state(drawn, self.generators)
        self.take_loader_state(waiting)
        return batch

    def _first_with_rows(self) -> Any:
        batches = self.source.batches(self.position.number)
        return next((batch for batch in batches if batch is not NoRows), None)

    def loader_state(self, *, ends_pass: bool) -> dict[str, Any] | None:
        """The state of a loader that keeps its own, read by one rank alone; None elsewhere.

        Args:
            ends_pass: whether the next batch is a new pass's.
        """
        own = self.source.own_state
        return None if own is None else own.state(ends_pass=ends_pass)

    def take_loader_state(self, state: dict[str, Any] | None) -> None:
        """Let the data's own loader go on from its state, where it keeps one."""
        own = self.source.own_state
        if own is not None and state is not None:
            own.take(state)

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators of the data's own, which their order may follow from."""
        return self.source.generators


def _begin(source: Source, position: Position) -> Iterator[Any]:
    """A pass's batches from a position on; what is drawn at its beginning is drawn again."""
    own = source.own_state
    if position.batches and own is not None and own.waits:
        return source.batches(position.number, position.batches)
    generators = source.generators
    if position.batches and position.began is not None:
        now = random_state(generators)
        set_random_state(position.began, generators)
        batches = source.batches(position.number, position.batches)
        set_random_state(now, generators)
        return batches
    position.began = random_state(generators)
    return source.batches(position.number)


def _passes(source: Source, position: Position, ranks: int) -> Iterator[Any]:
    """Pass after pass, until the source gives nothing or can't be read again."""
    while True:
        count = position.batches
        for batch in _begin(source, position):
            count += ranks
            position.batches = count
            yield batch
        if not source.repeatable or count == 0:
            return
        position.number += 1
        position.batches = 0


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
