"""Losses: names, torch.nn losses and callables as one kind of object, for one output or several."""

from fitkit.losses.compiled import CompiledLoss, Term
from fitkit.losses.loss import Count, Loss, checked_count, resolve

__all__ = ["CompiledLoss", "Count", "Loss", "Term", "checked_count", "resolve"]
