"""Progressive resizing: a training begins with small images, and ends with large ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from fitkit.arguments import check_count, check_epochs, describe
from fitkit.errors import ConfigurationError
from fitkit.seams import BatchTransform, Callback, WholeBatch
from fitkit.typing import Tree


class Progressive(Callback, BatchTransform):
    """Resizes training images on the device, to a size for each epoch.

    Early epochs with small images cost less. The images are interpolated as
    `torch.nn.functional.interpolate(mode="bilinear", antialias=True)` does, before the batch
    transforms of `compile`. Targets stay as they are. Validations see images as the data have them.
    With `jit_compile`, each size is compiled once.

    Args:
        size: a dict from epoch (from 0) to the height and width in pixels: one number for both, or
            a pair. None stands for images as they are, which epochs before the first one have too.

    Example:
        >>> import torch, fitkit
        >>> layers = torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        >>> model = fitkit.Model(torch.nn.Sequential(*layers, torch.nn.Linear(4, 2)))
        >>> model.compile("adam", "cross_entropy")
        >>> x, y = torch.randn(32, 3, 16, 16), torch.randint(2, (32,))
        >>> sizes = fitkit.callbacks.Progressive(size={0: 8, 1: 12, 2: None})
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[sizes])

    Raises:
        ConfigurationError, ArgumentTypeError: an epoch or a size is invalid. Also at the first
            batch to resize, if the inputs aren't one tensor of images.

    Reference: Tan and Le, EfficientNetV2, 2021, arXiv:2104.00298.
    """

    stops_alike = True

    def __init__(self, size: Mapping[int, int | tuple[int, int] | None]) -> None:
        check_epochs("size", size, what="sizes", example="{0: 128, 10: 224}")
        self.size: dict[int, tuple[int, int] | None] = {
            epoch: None if given is None else _pair(epoch, given)
            for epoch, given in sorted(size.items())
        }

    def size_in(self, epoch: int) -> tuple[int, int] | None:
        """Return the height and width in an epoch; None for images as they are."""
        begun = [size for first, size in self.size.items() if first <= epoch]
        return begun[-1] if begun else None

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return the images in the epoch's size, and the targets as they are."""
        size = self.size_in(self.model.current_epoch)
        if size is None:
            return x, y
        if not isinstance(x, torch.Tensor) or x.ndim != 4 or not x.is_floating_point():
            raise ConfigurationError(
                "Progressive resizes batches of images (N, channels, height, width) of floats, "
                f"but the inputs are {describe(x)}. Write a batch transform for others."
            )
        if tuple(x.shape[-2:]) == size:
            return x, y
        return F.interpolate(x, size, mode="bilinear", antialias=True), y


def _pair(epoch: int, size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)
    check_count(f"size[{epoch}]", height)
    check_count(f"size[{epoch}]", width)
    return int(height), int(width)
