"""What a net's own loss is the mean over, found by calling the net with a first batch once more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fitkit import trees
from fitkit.losses.own import OwnLoss
from fitkit.outputs import is_hugging_face
from fitkit.typing import Tree

ITEMS = "num_items_in_batch"
"""What Hugging Face's nets divide the sum of their loss by, if they are given it."""


class TakesInputs(Protocol):
    """Says which inputs a net takes (`step.Caller`)."""

    def takes(self, x: Tree, name: str) -> bool:
        """Whether an input of this name may be among those passed by keyword."""

    def takes_any_keyword(self, x: Tree) -> bool:
        """Whether inputs of any name may be among them."""


def takes_items_in_batch(net: nn.Module, caller: TakesInputs, x: Tree) -> bool:
    """Whether a net may give its loss's sum: by its signature, or by one of Hugging Face's in it,
    to which it passes on any keyword."""
    if caller.takes(x, ITEMS):
        return True
    return caller.takes_any_keyword(x) and any(map(is_hugging_face, net.modules()))


def ask_for_sum(
    own: OwnLoss, computed: Callable[[Any], Any], x: Mapping[str, Any], y: Tree
) -> None:
    """Find out what counts from the batch's mean and sum.

    Args:
        own: gets what was found.
        computed: calls the net, in evaluation mode and without gradients.
        x, y: the batch's inputs, and its labels.
    """
    with contextlib.suppress(TypeError):  # where it is passed on, nobody may take it
        own.decide_by_sum(computed(x), computed({**x, ITEMS: 1}), y)


def ask_for_rows(
    own: OwnLoss,
    computed: Callable[[Any], Any],
    prediction: Tree,
    x: Mapping[str, Any],
    y: Any,
    *,
    is_part: bool,
) -> None:
    """Find out what counts from two samples, alone and together, if only they can tell.

    Args:
        own, computed, x, y: as in `ask_for_sum`.
        prediction: the net's output for the batch.
        is_part: whether batches are parts of an update.

    Raises:
        ConfigurationError: the loss is the samples' sum, and batches are parts.
    """
    pair = own.telling_rows(prediction, y)
    if pair is None:
        return

    def asked(*rows: int) -> tuple[torch.Tensor, Any]:
        def some(leaf: object) -> object:
            if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == len(y):
                return leaf[list(rows)]
            return leaf

        return y[list(rows)], computed(trees.map_leaves(some, x))

    one, other = pair
    own.decide_by_rows(asked(one), asked(other), asked(one, other), is_part=is_part)
