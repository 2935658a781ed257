"""What the passes over data draw: the key of their samples, and the numbers of their orders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from fitkit.data.generators import OF_THE_PROCESS
from fitkit.distributed.collectives import Collectives
from fitkit.progress import Progress
from fitkit.random_states import kept_random_numbers, random_state, set_random_state
from fitkit.typing import PlainData

KEY_BITS = (1 << 63) - 1
"""A key is an integer from 0 to this, so that files and tensors hold it."""


def key_of_state() -> int:
    """Return a key by the state of torch's generator. Nothing is drawn."""
    state = torch.default_generator.get_state().numpy()
    return xxhash.xxh3_64_intdigest(state.tobytes()) & KEY_BITS


def key_within(key: int, *names: object) -> int:
    """Return the key of a part, such as a validation set or one of several loaders."""
    return xxhash.xxh3_64_intdigest(repr((key, *names)).encode()) & KEY_BITS


TORCH = OF_THE_PROCESS[0]


class OrderNumbers:
    """The numbers from which orders are drawn: those of this process, until others draw there.

    A pass draws its order from the process's generators, as a loop over a loader does. But what the
    net draws between two passes (dropout) doesn't move it: from then on the orders have a state of
    their own, which takes the place of the process's while they are drawn. Torch's generator moves
    on by as many numbers, so that the net draws what it draws in a loop over the loader.
    """

    def __init__(self) -> None:
        self.states: list[Any] | None = None
        self.draws_on: bool = False  # whether the last pass draws with each of its entries

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Put the orders' states in the place of the process's, for the length of a block."""
        others = [numbers.save() for numbers in OF_THE_PROCESS]
        parted: list[tuple[Any, Any]] = []
        for numbers, own, other in zip(OF_THE_PROCESS, self.states or others, others, strict=True):
            if own is not other and numbers.mark(own) != numbers.mark(other):
                numbers.restore(own)
                parted.append((numbers, other))
        try:
            yield
        finally:
            before, self.states = self.states, [numbers.save() for numbers in OF_THE_PROCESS]
            for numbers, other in parted:
                numbers.restore(other)
            if before is not None and any(numbers is TORCH for numbers, _ in parted):
                _move_on(_words_between(before[0], self.states[0]))

    def start_here(self) -> None:
        """Let the process's present states be those of the orders."""
        self.states = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw a pass again that begins by the process's present states, for the length of a block.

        Then the states are those before, which other passes (validations) may have moved since the
        pass began; but those of the block if the pass draws on.
        """
        before, self.draws_on = self.states, False
        self.start_here()
        yield
        if before is not None and not self.draws_on:
            self.states = before

    def state(self) -> PlainData | None:
        """Return the state as plain data; None before the first pass."""
        if self.states is None:
            return None
        with kept_random_numbers(devices=[]):
            for numbers, own in zip(OF_THE_PROCESS, self.states, strict=True):
                numbers.restore(own)
            return random_state(devices=[])

    def take_state(self, state: PlainData) -> None:
        """Give back what `state` returned."""
        with kept_random_numbers(devices=[]):
            set_random_state(state, devices=[])
            self.states = [numbers.save() for numbers in OF_THE_PROCESS]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Give back the state at the block's end."""
        before = self.states
        try:
            yield
        finally:
            self.states = before


MOST_WORDS = 64
"""The most numbers of 32 bits by which torch's generator moves on. A pass of a loader takes 4."""


def _words_between(before: torch.Tensor, after: torch.Tensor) -> int:
    """Return how many numbers of 32 bits torch's generator gave between two states; 0 for many."""
    generator = torch.Generator()
    generator.set_state(before)
    for count in range(MOST_WORDS + 1):
        if torch.equal(generator.get_state(), after):
            return count
        torch.empty((), dtype=torch.int32).random_(generator=generator)
    return 0


def _move_on(words: int) -> None:
    """Let torch's generator give so many numbers, which nobody uses."""
    for _ in range(words):
        torch.empty((), dtype=torch.int32).random_()


class DataDraws:
    """What the data of one call draw with.

    Args:
        key: from which the random numbers of samples follow, with the number of the pass and the
            sample's index.
        numbers: those of the orders; None where they are the process's own in any case.
    """

    def __init__(self, key: int, numbers: OrderNumbers | None = None) -> None:
        self.key = key
        self.numbers = numbers

    def within(self, *names: object) -> DataDraws:
        """Return those of a part of the call, such as a validation. Its orders are drawn by
        turns with these.
        """
        return DataDraws(key_within(self.key, *names), self.numbers)

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Let the orders' numbers be the process's, for the length of a block."""
        return contextlib.nullcontext() if self.numbers is None else self.numbers.drawing()

    def each(self, indices: Iterator[Any], *, at_once: bool) -> Iterator[Any]:
        """Yield a sampler's entries, drawn from the orders' numbers.

        Args:
            at_once: whether the sampler draws all with its first entry.
        """
        missing = object()
        while self.numbers is not None:
            self.numbers.draws_on = not at_once
            with self.drawing():
                entry = next(indices, missing)
            if entry is missing:
                return
            yield entry
            if at_once:
                break
        yield from indices

    def state(self) -> PlainData | None:
        """Return the state of the orders' numbers, as plain data; None before the first pass."""
        return None if self.numbers is None else self.numbers.state()

    def go_on(self, progress: Progress) -> None:
        """Note the key in a training's progress, and take the orders' numbers from there."""
        progress.key = self.key
        state = progress.orders[0] if progress.orders else None
        if self.numbers is not None and state is not None:
            self.numbers.take_state(state)


def draws_of_fit(resumed: Progress | None, ranks: Collectives) -> DataDraws:
    """Return what the data of a fit draw with: by rank 0's random state, or as it was saved.

    Ranks:
        Collective.
    """
    key = None if resumed is None else resumed.key
    return DataDraws(ranks.broadcast(key_of_state()) if key is None else key, OrderNumbers())
