"""Class weights, where `fit` was given some: one weight per sample or position, by its label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fitkit.distributed.collectives import Collectives

if TYPE_CHECKING:
    from fitkit.extras.class_labels import Labels


class ClassWeights(Protocol):
    """Turns labels into weights. `begin` says how targets are read as labels."""

    def expect(self, target: Any, rank: int) -> None:
        """Take the targets of in-memory data: `begin` looks at all of them."""

    def begin(self, labels: Labels, target: torch.Tensor, values: torch.Tensor) -> None:
        """Take the way in which targets are read, found by the first batch.

        Args:
            target: the first batch's.
            values: the loss's values of that batch, which the weights multiply.

        Raises:
            ConfigurationError: some label can't be read so, or the values have another shape.
        """

    def __call__(self, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the weights of the labels in a batch, multiplied by `weight` if there is one."""

    def note(self, target: torch.Tensor) -> None:
        """Note the labels of a batch of data that aren't in memory.

        Raises:
            ConfigurationError: some label can't be read, and finding that needs no waiting.
        """

    def check_seen(self, collectives: Collectives) -> None:
        """Warn at the first epoch's end of named classes that none of its labels had; once.

        Raises:
            ConfigurationError: some label wasn't one.

        Ranks:
            Collective: each rank has seen its own labels.
        """


def class_weights_of(given: Mapping[int, float] | None) -> ClassWeights | None:
    """Return the weights that `class_weight` means; None for none.

    Raises:
        ArgumentTypeError, ConfigurationError: a key isn't a class number, or a weight is negative
            or not a number.
    """
    if given is None:
        return None
    from fitkit.extras.class_weights import WeightTable

    return WeightTable(given)
