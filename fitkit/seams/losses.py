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
from fitkit.losses.formulas import classes, elements, full, weighted_mean
from fitkit.losses.labels import Labels
from fitkit.losses.looks import undone
from fitkit.losses.loss import is_labels
from fitkit.losses.names import LOSSES, Definition

__all__ = [
    "LOSSES",
    "Ask",
    "CompiledLoss",
    "Count",
    "Definition",
    "Labels",
    "Loss",
    "Term",
    "Untrained",
    "checked_count",
    "classes",
    "elements",
    "full",
    "is_labels",
    "resolve",
    "undone",
    "weighted_mean",
]
