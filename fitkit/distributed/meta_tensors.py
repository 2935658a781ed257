"""Modules that were built under `torch.device("meta")`: shapes, and no numbers until they train."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from fitkit.modes import tensors_of


def fill_meta(module: nn.Module, covered: Collection[str] = ()) -> None:
    """Give what is on the meta device main memory and numbers.

    Args:
        module: the parameters stay the same objects.
        covered: names of tensors that will be overwritten.

    Raises:
        ConfigurationError: a submodule can't draw its values. Nothing is changed then.
    """
    if any(tensor.is_meta for tensor in tensors_of(module)):
        from fitkit.extras.unfilled import Unfilled

        Unfilled(module, covered).fill()
