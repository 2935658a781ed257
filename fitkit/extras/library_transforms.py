"""What torchvision's and Kornia's transforms take as they are, and what they would get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fitkit.errors import ConfigurationError
from fitkit.extras.batch_transforms import FunctionTransform, WholeBatch, name_of
from fitkit.typing import Tree

MOVERS = {
    "torchvision.transforms.v2._geometry": "",
    "kornia.augmentation._2d.geometric.base": "GeometricAugmentationBase2D",
}
"""Modules of these libraries whose classes move pixels, and the base class that says so."""

MIXES = ("RandomMixUpV2", "RandomCutMixV2")
"""Kornia's modules that return labels as (label, label of the partner, ratio)."""


def translated(argument: str, value: Any) -> Any:
    """Return a library's transform as a batch transform; other things as they are."""
    return LibraryTransform(value) if argument == "batch_transforms" else value


class LibraryTransform(FunctionTransform):
    """A transform of torchvision's or Kornia's, which is called as it is.

    Args:
        transform: a module, or a container of several.

    Raises:
        ConfigurationError: it returns labels that no loss takes.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        for part in _parts(transform):
            if (name := type(part).__name__) in MIXES:
                ours = "MixUp" if name == MIXES[0] else "CutMix"
                raise ConfigurationError(
                    f"Kornia's {name} returns labels that losses don't take, or mixes images "
                    f"alone. Write fitkit.transforms.{ours}(1.0), which mixes labels to "
                    "probabilities."
                )
        # What a container of Kornia's is called with, such as ["IMAGE", "MASK"].
        self._keys = len(getattr(transform, "data_keys", None) or ())
        super().__init__(transform, self._keys == 2 if 0 < self._keys < 3 else None)

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's inputs and targets, changed.

        Raises:
            ConfigurationError: the transform would change only a part of the batch.
        """
        if whole.is_first:
            self._check(x, y)
        return super().apply(x, y, whole)

    def _check(self, x: Tree, y: Tree) -> None:
        if not isinstance(x, torch.Tensor):
            if _is_of(self.function, "torchvision"):
                raise ConfigurationError(
                    f"The inputs are a {type(x).__name__}, of which torchvision's {name_of(self)} "
                    "changes the first tensor only. Write a function (x, y) -> (x, y) that calls "
                    "it on each image."
                )
            return
        # torchvision's own kinds of tensors are known to it, and move with the images.
        if type(y) is not torch.Tensor or y.ndim < 3 or y.shape[-2:] != x.shape[-2:]:
            return
        mover = next((part for part in _parts(self.function) if _moves(part)), None)
        if mover is None or self._keys > 1:
            return
        raise ConfigurationError(
            f"{type(mover).__name__} moves the pixels of images, but targets of shape "
            f"{tuple(y.shape)}, which look like maps of them, would stay. Kornia changes both in "
            'AugmentationSequential(…, data_keys=["input", "mask"]); torchvision in a function '
            "(x, y) that calls the transform on torchvision.tv_tensors.Image(x) and Mask(y)."
        )


def _is_of(thing: object, library: str) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in type(thing).__mro__)


def _parts(transform: Any) -> Iterator[object]:
    """Yield a transform and all that it is made of."""
    if isinstance(transform, torch.nn.Module):
        yield from transform.modules()
    held = getattr(transform, "transforms", ())
    for part in held if isinstance(held, (list, tuple)) else ():
        yield from _parts(part)


def _moves(part: object) -> bool:
    return any(
        base.__module__ in MOVERS and MOVERS[base.__module__] in ("", base.__name__)
        for base in type(part).__mro__
    )
