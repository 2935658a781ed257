"""Mix and erase whole training batches: MixUp, CutMix, RandomErasing, and a choice of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.arguments import check_count, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.batch_transforms import BatchTransform, WholeBatch, as_transform, name_of
from fitkit.typing import Tree

TRIES = 10
"""How many boxes `RandomErasing` draws for an image, of which it takes the first that fits."""


class _Mixing(BatchTransform):
    """Mixes each row with the one before it in the whole batch, in one ratio for all rows.

    Args:
        alpha: of the distribution Beta(alpha, alpha), from which each batch's ratio is drawn.
        p: the probability that a batch is mixed.
        classes: the number of classes.
    """

    def __init__(self, alpha: float = 1.0, *, p: float = 1.0, classes: int | None = None) -> None:
        alpha = check_number("alpha", alpha, above=0)
        p = check_number("p", p, minimum=0, maximum=1)
        classes = check_count("classes", classes, optional=True)
        self.alpha = alpha
        self.p = p
        self.classes = classes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alpha!r})"

    def _check(self, x: Tree, y: Tree, whole: WholeBatch) -> None:
        """Refuse what has no rows to be mixed."""
        if isinstance(y, (list, tuple)) and any(isinstance(part, Mapping) for part in y):
            raise ConfigurationError(
                f"{type(self).__name__} can't mix targets that are dicts for each image, such as "
                "boxes. Write a function (x, y) -> (x, y) that joins them."
            )
        rows = {len(leaf) for leaf in trees.tensors((x, y)) if leaf.ndim}
        if len(rows) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} mixes rows, but the tensors of a batch have different "
                f"numbers of them: {sorted(rows)}. Write a function (x, y) -> (x, y)."
            )
        if whole.has_weights:
            raise ConfigurationError(
                f"{type(self).__name__} mixes rows, which have sample weights here. Leave out the "
                "weights, or write a training_step that weighs each part of a mixed row."
            )

    def _mixed_targets(self, y: Tree, ratio: float, whole: WholeBatch) -> Tree:
        def mixed(target: Any, place: Hashable = None) -> Any:
            if not isinstance(target, torch.Tensor):
                raise ConfigurationError(
                    f"{type(self).__name__} can't mix targets that are {describe(target)}. Give "
                    "labels (N,), probabilities (N, C) or numbers as tensors."
                )
            soft = whole.soft(target, self.classes, place)
            return whole.rolled(soft).lerp_(soft, ratio)

        if isinstance(y, Mapping):
            return {place: mixed(target, place) for place, target in y.items()}
        if isinstance(y, (list, tuple)):
            return tuple(mixed(target, place) for place, target in enumerate(y))
        return y if y is None else mixed(y)


class MixUp(_Mixing):
    """Mixes each row with the one before it: `ratio * x + (1 - ratio) * x_before`; so the targets.

    The ratio is drawn for each batch. Before the first row comes the last, as in torchvision's
    `MixUp`. Since the data are shuffled, the row before is any other one. Labels (N,) become
    probabilities (N, C), which losses and metrics by name take. Accuracy counts the larger part.

    On several ranks the rows and the ratio are those of one process. Each rank gets one row from
    another. Accumulated batches are mixed each by itself.

    Args:
        alpha: of the distribution Beta(alpha, alpha) of the ratio. Default 1 draws it evenly from
            0 to 1. The smaller, the less is mixed.
        p: the probability that a batch is mixed. Default 1.
        classes: the number of classes C. Default None: as many as the net has outputs.

    Raises:
        ConfigurationError: `alpha` isn't above 0, or `p` is outside of 0 to 1. In a training: an
            input isn't a floating-point tensor, rows have weights, or C can't be seen.

    Source:
        Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412.

    Example:
        >>> import torch, fitkit
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
        >>> model = fitkit.Model(net)
        >>> mixed = fitkit.transforms.MixUp(0.2)
        >>> model.compile("adam", "cross_entropy", batch_transforms=[mixed])
        >>> images, labels = torch.rand(64, 3, 4, 4), torch.randint(10, (64,))
        >>> history = model.fit(images, labels, verbose=0)
    """

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's inputs and targets, mixed."""
        self._check(x, y, whole)
        ratio = float(whole.numbers.beta(self.alpha, self.alpha))
        if whole.numbers.random() >= self.p:
            ratio = 1.0

        def mixed(rows: Any) -> Any:
            if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
                what = rows.dtype if isinstance(rows, torch.Tensor) else describe(rows)
                raise ConfigurationError(
                    f"MixUp mixes floating-point inputs, but one is {what}. Leave it out of the "
                    "batch, or write a function (x, y) -> (x, y) that mixes the others."
                )
            return whole.rolled(rows).lerp_(rows, ratio)

        return trees.map_leaves(mixed, x), self._mixed_targets(y, ratio, whole)


class CutMix(_Mixing):
    """Pastes a box of the image before into each image; the targets are mixed by the box's area.

    Place and size of the box are drawn for each batch, as in torchvision's `CutMix`. Labels (N,)
    become probabilities (N, C). Labels of pixels (N, H, W) are cut as the images are. All else is
    as for `MixUp`.

    Args:
        alpha: of the distribution Beta(alpha, alpha) of the part that stays. Default 1 draws it
            evenly.
        p: the probability that a batch is mixed. Default 1.
        classes: the number of classes C. Default None: as many as the net has outputs.

    Raises:
        ConfigurationError: as for `MixUp`, or the inputs aren't images (N, C, H, W) of one size.

    Source:
        Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
        Features", arXiv:1905.04899.

    Example:
        >>> import torch, fitkit
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
        >>> model = fitkit.Model(net)
        >>> cut = fitkit.transforms.CutMix(1.0)
        >>> model.compile("adam", "cross_entropy", batch_transforms=[cut])
        >>> images, labels = torch.rand(64, 3, 4, 4), torch.randint(10, (64,))
        >>> history = model.fit(images, labels, verbose=0)
    """

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's images and targets, with boxes pasted in."""
        self._check(x, y, whole)
        height, width = _size_of_images("CutMix", x)
        numbers = whole.numbers
        part = float(numbers.beta(self.alpha, self.alpha))
        middle_y, middle_x = int(numbers.integers(height)), int(numbers.integers(width))
        half = 0.5 * math.sqrt(1.0 - part)
        top, bottom = _around(middle_y, half * height, height)
        left, right = _around(middle_x, half * width, width)
        if numbers.random() >= self.p:
            bottom = top
        ratio = 1.0 - (bottom - top) * (right - left) / (height * width)

        def pasted(images: torch.Tensor) -> torch.Tensor:
            result = images.clone()
            box = (..., slice(top, bottom), slice(left, right))
            result[box] = whole.rolled(images[box])
            return result

        if isinstance(y, torch.Tensor) and y.shape[-2:] == (height, width) and y.ndim > 2:
            return trees.map_leaves(pasted, x), pasted(y)
        return trees.map_leaves(pasted, x), self._mixed_targets(y, ratio, whole)


class RandomErasing(BatchTransform):
    """Erases a box of each image, with a probability.

    Each image has a box of its own. On several ranks the boxes are those of one process.

    Args:
        p: the probability that an image is erased. Default 0.5.
        scale: the box's least and largest part of the image's area. Default (0.02, 0.33).
        ratio: the box's least and largest height divided by its width. Default (0.3, 3.3).
        value: what erased pixels become. Default 0.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is out of range. In a training: the
            inputs aren't images (N, C, H, W) of one size.

    Source:
        Zhong et al., "Random Erasing Data Augmentation", arXiv:1708.04896.

    Example:
        >>> import torch, fitkit
        >>> erased = fitkit.transforms.RandomErasing(1.0, value=0.5)
        >>> images, labels = erased(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))
        >>> [bool((image == 0.5).any()) for image in images]
        [True, True]
    """

    def __init__(
        self,
        p: float = 0.5,
        *,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        value: float = 0.0,
    ) -> None:
        p = check_number("p", p, minimum=0, maximum=1)
        self.p = p
        self.scale: tuple[float, float] = _checked_pair("scale", scale)
        self.ratio: tuple[float, float] = _checked_pair("ratio", ratio)
        value = check_number("value", value)
        self.value = value

    def __repr__(self) -> str:
        return f"RandomErasing({self.p!r})"

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's images with erased boxes, and the targets as they are."""
        height, width = _size_of_images("RandomErasing", x)
        boxes = self._boxes(whole.numbers, whole.total, height, width)[whole.rows()]

        def erased(images: torch.Tensor) -> torch.Tensor:
            own = np.zeros((len(images), 4), np.int64)
            own[: len(boxes)] = boxes
            inside = _inside(own, height, width, images.device)
            others = (1,) * (images.ndim - 3)  # channels, and the depth of a volume
            # Of a copy, because masked_fill changes the memory format.
            copied = images.clone()
            return copied.masked_fill_(inside.view(-1, *others, height, width), self.value)

        return trees.map_leaves(erased, x), y

    def _boxes(
        self, numbers: np.random.Generator, count: int, height: int, width: int
    ) -> np.ndarray:
        """Return the edges of each image's box (N, 4): top, bottom, left, right. An image that
        stays has an empty one.
        """
        drawn = np.flatnonzero(numbers.random(count) < self.p)
        areas = numbers.uniform(*self.scale, (len(drawn), TRIES)) * height * width
        least, largest = map(math.log, self.ratio)
        ratios = np.exp(numbers.uniform(least, largest, (len(drawn), TRIES)))
        heights = np.rint(np.sqrt(areas * ratios)).astype(np.int64)
        widths = np.rint(np.sqrt(areas / ratios)).astype(np.int64)
        fits = (heights < height) & (widths < width)
        rows, first = np.arange(len(drawn)), fits.argmax(1)
        does_fit = fits[rows, first]
        high, wide = heights[rows, first] * does_fit, widths[rows, first] * does_fit
        places = numbers.random((2, len(drawn)))
        top = (places[0] * (height - high + 1)).astype(np.int64)
        left = (places[1] * (width - wide + 1)).astype(np.int64)
        boxes = np.zeros((count, 4), np.int64)
        boxes[drawn] = np.stack([top, top + high, left, left + wide], 1)
        return boxes


class OneOf(BatchTransform):
    """Changes each batch by one of several transforms, drawn for each batch.

    Args:
        transforms: at least one: of this module, or other functions that
            `compile(batch_transforms=…)` takes.
        weights: how often each is taken, relative to the others. Default None: all alike.

    Raises:
        ConfigurationError, ArgumentTypeError: a transform can't be called, or `weights` doesn't
            have one number of at least 0 for each.

    Example:
        >>> import fitkit
        >>> from fitkit.transforms import CutMix, MixUp, OneOf
        >>> mixed = OneOf(MixUp(0.2), CutMix(1.0))
    """

    def __init__(
        self, *transforms: Callable[..., Any], weights: Sequence[float] | None = None
    ) -> None:
        if not transforms or not all(map(callable, transforms)):
            raise ArgumentTypeError(
                f"OneOf takes transforms, one after the other: OneOf(MixUp(0.2), CutMix(1.0)). "
                f"It was given {describe(transforms)}."
            )
        shares = [1.0] * len(transforms) if weights is None else [*weights]
        shares = [check_number("weights", share, minimum=0) for share in shares]
        if len(shares) != len(transforms) or not sum(shares) > 0:
            raise ConfigurationError(
                f"weights={describe(weights)} needs a number of at least 0 for each of the "
                f"{len(transforms)} transforms, and one above 0."
            )
        self.transforms: list[BatchTransform] = [as_transform(one) for one in transforms]
        self.draws_alike: bool = all(one.draws_alike for one in self.transforms)
        self.shares: list[float] = [share / sum(shares) for share in shares]

    def __repr__(self) -> str:
        return f"OneOf({', '.join(map(name_of, self.transforms))})"

    def apply(self, x: Tree, y: Tree, whole: WholeBatch) -> tuple[Tree, Tree]:
        """Return a rank's inputs and targets as the drawn transform changes them."""
        chosen = int(whole.numbers.choice(len(self.transforms), p=self.shares))
        return self.transforms[chosen].apply(x, y, whole)


def _inside(boxes: np.ndarray, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Return which pixels (N, H, W) are inside of their image's box (N, 4)."""
    if device.type == "cpu":  # a loop takes a fifth of the time there
        inside = np.zeros((len(boxes), height, width), bool)
        for image, (top, bottom, left, right) in zip(inside, boxes.tolist(), strict=True):
            image[top:bottom, left:right] = True
        return torch.from_numpy(inside)
    edges = torch.from_numpy(boxes).to(device, non_blocking=True)
    top, bottom, left, right = edges.unsqueeze(1).unbind(2)
    rows, columns = (torch.arange(size, device=device) for size in (height, width))
    in_rows = (rows >= top) & (rows < bottom)
    in_columns = (columns >= left) & (columns < right)
    return in_rows.unsqueeze(2) & in_columns.unsqueeze(1)


def _size_of_images(name: str, x: Tree) -> tuple[int, int]:
    """Return the height and width of all images in a batch's inputs."""
    leaves = list(trees.leaves(x))
    sizes = {leaf.shape[-2:] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 3}
    if len(sizes) != 1 or any(getattr(leaf, "ndim", 0) < 4 for leaf in leaves):
        shapes = ", ".join(str(tuple(getattr(leaf, "shape", ()))) for leaf in leaves)
        raise ConfigurationError(
            f"{name} changes images (N, C, H, W) of one size, but the inputs have the shapes "
            f"{shapes}. Write a function (x, y) -> (x, y) for those that are images."
        )
    height, width = sizes.pop()
    return height, width


def _around(middle: int, half: float, size: int) -> tuple[int, int]:
    """Return the edges of an interval within an image."""
    return max(int(middle - half), 0), min(int(middle + half), size)


def _checked_pair(name: str, value: Any) -> tuple[float, float]:
    """Return two numbers above 0 in order."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(f"{name}={describe(value)} must be two numbers: (least, largest).")
    least, largest = (check_number(name, number, above=0) for number in value)
    if least > largest:
        raise ConfigurationError(f"{name}={describe(value)} must be (least, largest).")
    return float(least), float(largest)
