"""Progressive sizes: a training begins with small images or batches, and ends with large ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from fitkit.arguments import check_count, check_epochs, describe
from fitkit.errors import ConfigurationError
from fitkit.extras.batch_transforms import BatchTransform, WholeBatch
from fitkit.seams.callbacks import Callback, SetsBatchSize, value_in
from fitkit.typing import Tree


class Progressive(Callback, BatchTransform, SetsBatchSize):
    """Gives training images a size for each epoch, batches a size, or both.

    Early epochs with small images cost less. The images are interpolated on the device as
    `torch.nn.functional.interpolate(mode="bilinear", antialias=True)` does, before the batch
    transforms of `compile`. Targets stay as they are. Validations see images as the data have them,
    in the batches of `fit`. With `jit_compile`, each size is compiled once.

    Args:
        size: a dict from epoch (from 0) to the height and width in pixels: one number for both, or
            a pair. None stands for images as they are, which epochs before the first one have too.
        batch_size: a dict from epoch to the samples in a batch of each process. None stands for
            the `batch_size` of `fit`, which epochs before the first one have too. The data are
            arrays or a Dataset. Each epoch is a pass over them. Learning rates stay as they are.

    Example:
        >>> import torch, fitkit
        >>> layers = torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        >>> model = fitkit.Model(torch.nn.Sequential(*layers, torch.nn.Linear(4, 2)))
        >>> model.compile("adam", "cross_entropy")
        >>> x, y = torch.randn(32, 3, 16, 16), torch.randint(2, (32,))
        >>> sizes = fitkit.callbacks.Progressive({0: 8, 2: None}, batch_size={0: 16, 2: 8})
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[sizes])
        >>> model.global_step
        8

    Raises:
        ConfigurationError, ArgumentTypeError: an epoch or a size is invalid. Also at the first
            batch to resize, if the inputs aren't one tensor of images. With `batch_size`, also in
            `fit`: the data make their own batches, or `steps_per_epoch` or `effective_batch_size`
            is given.

    Reference: Tan and Le, EfficientNetV2, 2021, arXiv:2104.00298. Smith et al., Don't Decay the
    Learning Rate, Increase the Batch Size, 2018, arXiv:1711.00489.
    """

    stops_alike = True

    def __init__(
        self,
        size: Mapping[int, int | tuple[int, int] | None] | None = None,
        *,
        batch_size: Mapping[int, int | None] | None = None,
    ) -> None:
        sizes, numbers = {}, {}
        if size is not None or batch_size is None:
            sizes = check_epochs("size", size, what="sizes", example="{0: 128, 10: 224}")
        if batch_size is not None:
            example = "{0: 256, 10: 64}"
            numbers = check_epochs("batch_size", batch_size, what="sizes", example=example)
        self.size: dict[int, tuple[int, int] | None] = {
            epoch: None if given is None else _pair(epoch, given) for epoch, given in sizes.items()
        }
        self.batch_size: dict[int, int | None] = {
            epoch: check_count(f"batch_size[{epoch}]", samples, optional=True)
            for epoch, samples in numbers.items()
        }
        self.changes_batches: bool = bool(self.size)

    def size_in(self, epoch: int) -> tuple[int, int] | None:
        """Return the height and width in an epoch; None for images as they are."""
        return value_in(self.size, epoch, None)

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
        if isinstance(y, torch.Tensor) and y.ndim > 2 and y.shape[-2:] == x.shape[-2:]:
            raise ConfigurationError(
                f"Progressive resizes images, but targets of shape {tuple(y.shape)}, which look "
                "like maps of them, would stay. Write a batch transform that resizes both."
            )
        if tuple(x.shape[-2:]) == size:
            return x, y
        try:
            resized = F.interpolate(x, size, mode="bilinear", antialias=True)
        except NotImplementedError:  # a CPU lacks it for half precision
            wide = F.interpolate(x.float(), size, mode="bilinear", antialias=True)
            resized = wide.to(x.dtype)
        return resized, y


def _pair(epoch: int, size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)
    return check_count(f"size[{epoch}]", height), check_count(f"size[{epoch}]", width)
