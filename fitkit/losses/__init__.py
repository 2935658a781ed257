"""Losses: names, torch.nn losses and callables as one kind of object, for one output or several."""

from fitkit.losses.compiled import CompiledLoss
from fitkit.losses.loss import Loss, resolve

__all__ = ["CompiledLoss", "Loss", "resolve"]
