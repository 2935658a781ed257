"""Which shapes of batches earn a compilation: those that come often, not an epoch's last batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

FEWEST_BATCHES = 16
"""How often a shape other than the first one must have come in a `fit`, before it is compiled.

A compilation takes from 3 seconds (two layers) to 20 (a transformer). A batch gains milliseconds.
"""

SMALLEST_PART = 8
"""And it must be one in so many of the batches, so that the last one of long epochs never is.

Unless so many as must come have come in a row: then batches have another size from now on.
"""

MANY = 4
"""With more shapes than these, all but the first count together: lengths that always differ."""


class Shapes:
    """Counts the shapes of the batches of a `fit`.

    Example:
        A thousand samples in batches of 32: each epoch's last batch, of 8, is one in 32 batches. It
        runs as written. If later epochs have batches of 64, these are compiled from the 16th on.
    """

    def __init__(self) -> None:
        self._first: Any = None
        self._others: Counter[Any] = Counter()
        self._batches = 0
        self._last: Any = None
        self._row = 0  # how often the last shape has come in a row, unless it is the first one

    def earns(self, shapes: Any) -> bool:
        """Count a batch, and return whether its shape is worth a compilation.

        Args:
            shapes: from `shapes_of`.
        """
        self._batches += 1
        if shapes == self._first:
            self._row = 0
            return True
        if self._first is None:
            self._first = shapes
            return True
        others = self._others
        others[shapes] += 1
        self._row = self._row + 1 if shapes == self._last else 1
        self._last = shapes
        if self._row >= FEWEST_BATCHES:
            return True
        count = others[shapes] if len(others) <= MANY else others.total()
        return count >= FEWEST_BATCHES and count * SMALLEST_PART >= self._batches
