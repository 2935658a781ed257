"""What torchvision's and Kornia's transforms take as they are, and what they would get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fitkit.errors import ConfigurationError
from fitkit.typing import Tree

MOVERS = {
    "torchvision.transforms.v2._geometry": "",
    "kornia.augmentation._2d.geometric.base": "GeometricAugmentationBase2D",
}
"""Modules of these libraries whose classes move pixels, and the base class that says so."""

MIXES = ("RandomMixUpV2", "RandomCutMixV2")
"""Kornia's modules that return labels as (label, label of the partner, ratio)."""


def kornia_keys(transform: object) -> list[str] | None:
    """Return what a container of Kornia's is called with: `["IMAGE", "MASK"]`; None for others.

    Raises:
        ConfigurationError: its labels are none that a loss takes.
    """
    if not _is_of(transform, "kornia"):
        return None
    for part in _parts(transform):
        if (name := type(part).__name__) in MIXES:
            ours = "MixUp" if name == MIXES[0] else "CutMix"
            raise ConfigurationError(
                f"Kornia's {name} returns labels that losses don't take, or mixes images alone. "
                f"Write fitkit.transforms.{ours}(1.0), which mixes labels to probabilities."
            )
    keys = getattr(transform, "data_keys", None)
    return None if keys is None else [str(getattr(key, "name", key)) for key in keys]


def check_library(transform: Callable[..., Any], x: Tree, y: Tree) -> None:
    """Refuse a batch of which a library's transform would change only a part.

    Raises:
        ConfigurationError: with what to write.
    """
    is_torchvision = _is_of(transform, "torchvision")
    if not is_torchvision and not _is_of(transform, "kornia"):
        return
    name = type(transform).__name__
    if is_torchvision and not isinstance(x, torch.Tensor):
        raise ConfigurationError(
            f"The inputs are a {type(x).__name__}, of which torchvision's {name} changes the first "
            "tensor only. Write a function (x, y) -> (x, y) that calls it on each image."
        )
    if not isinstance(x, torch.Tensor) or type(y) is not torch.Tensor or y.ndim < 3:
        return
    mover = next((part for part in _parts(transform) if _moves(part)), None)
    if mover is None or y.shape[-2:] != x.shape[-2:] or len(kornia_keys(transform) or ()) > 1:
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
