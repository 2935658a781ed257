"""For losses: what a name means, and what asks other nets.

Example:
    >>> import torch, fitkit
    >>> from fitkit.outputs import LossHint
    >>> from fitkit.seams.losses import LOSSES, Definition, elements
    >>> def quartic(prediction, target):
    ...     return (prediction - target) ** 4
    >>> added = LOSSES.add("quartic", Definition(quartic, elements, LossHint(task="regression")))
    >>> model = fitkit.Model(torch.nn.Identity())
    >>> model.compile(loss="quartic", accelerator="cpu", devices=1)
    >>> model.evaluate(torch.full((2, 1), 3.0), torch.ones(2, 1), verbose=0)
    16.0
"""

from fitkit.held_modules import Untrained
from fitkit.losses import Ask, CompiledLoss, Count, Loss, Term, checked_count, resolve
from fitkit.losses.compiled import total_of
from fitkit.losses.formulas import (
    EPSILON,
    HALF_TYPES,
    LossFunction,
    Match,
    classes,
    elements,
    full,
    index_lists,
    indices,
    last_axis_indices,
    vectors,
    weighted_mean,
)
from fitkit.losses.looks import undone
from fitkit.losses.loss import is_labels
from fitkit.losses.names import LOSSES, Definition
from fitkit.losses.own import NetLoss, carried

__all__ = [
    "EPSILON",
    "HALF_TYPES",
    "LOSSES",
    "Ask",
    "CompiledLoss",
    "Count",
    "Definition",
    "Loss",
    "LossFunction",
    "Match",
    "NetLoss",
    "Term",
    "Untrained",
    "carried",
    "checked_count",
    "classes",
    "elements",
    "full",
    "index_lists",
    "indices",
    "is_labels",
    "last_axis_indices",
    "resolve",
    "total_of",
    "undone",
    "vectors",
    "weighted_mean",
]
