"""Loaders that keep their own place, as torchdata's `StatefulDataLoader` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fitkit.random_states import random_state, set_random_state


def own_state_of(loader: Any) -> OwnState | None:
    """What follows a loader's own state; None for a loader that keeps none."""
    methods = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
    return OwnState(loader) if all(callable(method) for method in methods) else None


class OwnState:
    """The state that a loader keeps by itself, asked for and given back at the right moments.

    Args:
        loader: an iterable with `state_dict()` and `load_state_dict(state)`.

    Attributes:
        waits: whether a state was taken that the next pass goes on from.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._taken: Any = None
        self._begun = False
        self._at_end = False
        self.waits = False

    def batches(self, generators: Sequence[torch.Generator] = ()) -> Iterator[Any]:
        """A new pass's batches; after `take` those that its pass still has.

        Args:
            generators: the loader's own, which are where the cut training had them.
        """
        if self.waits:
            self._load(self._taken["state"], generators)
        self._begun, self._at_end = True, False
        return self._until_end(iter(self._loader))

    def _load(self, state: Any, generators: Sequence[torch.Generator]) -> None:
        """Give the loader its state, without a draw that the training didn't make that was cut."""
        now = random_state(generators)
        self._loader.load_state_dict(state)
        self._loader.state_dict()  # torchdata's loader loads at the next use: let it be this one
        set_random_state(now, generators)
        self.waits = False

    def _until_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._at_end = True

    def state(self, *, ends_pass: bool) -> dict[str, Any] | None:
        """The loader's state, to go on from; None where a new pass begins as the first one does.

        Args:
            ends_pass: whether the next batch is a new pass's. A state from the middle of a pass
                that was broken off would go on with its rest instead.
        """
        if self.waits:
            taken: dict[str, Any] = self._taken
            return taken
        # A loader that is asked before its first pass begins one: workers start, numbers are drawn.
        if not self._begun or (ends_pass and not self._at_end):
            return None
        return {"state": self._loader.state_dict()}

    def take(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from what `state` gave."""
        self._taken, self.waits = state, True
