"""What losses compute: how a target meets its prediction, and the formulas that torch lacks.

Shapes: N samples, C classes, D values; `...` are positions (time, height and width).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fitkit.errors import ConfigurationError

Pair = tuple[torch.Tensor, torch.Tensor]
Match = Callable[[torch.Tensor, torch.Tensor], Pair]

HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

# ---- how a target meets its prediction: at each step, the usual case in two comparisons ----


def elements(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    """One target value for each predicted value.

    A target that lacks, or has, one last dimension of length 1 is reshaped to the prediction.

    Raises:
        ConfigurationError: the shapes differ otherwise; torch would broadcast some of them.
    """
    if prediction.shape != target.shape:
        target = _reshaped(prediction, target)
    return _one_type(prediction, target)


def vectors(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    """Return a target vector for each predicted vector: (N, ..., D) both.

    Raises:
        ConfigurationError: the shapes differ.
    """
    if prediction.shape != target.shape:
        raise _different_shapes(prediction, target)
    return _one_type(prediction, target)


def classes(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    """Class indices or class probabilities for scores (N, C, ...), as `F.cross_entropy` takes them.

    Of the prediction's shape: probabilities, one-hot labels of any type. Else class indices
    (N, ...) or (N, 1, ...) of any type, also whole numbers stored as floats; they become int64.
    """
    if target.dtype is torch.int64 and target.ndim == prediction.ndim - 1:
        return full(prediction), target
    if target.shape == prediction.shape:
        return vectors(prediction, target)
    return indices(prediction, target)


def indices(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    """Class indices for scores (N, C, ...): int64 (N, ...), from any type, (N, 1, ...) too."""
    if target.ndim == prediction.ndim and target.shape[1] == 1:
        target = target.squeeze(1)
    return _indexed(prediction, target)


def last_axis_indices(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    """Class indices for Keras: probabilities (N, ..., C) and int64 (N, ...).

    Keras's class axis is the last one. Where the target's shape fits only torch's axis 1, that is
    the class axis, and the result has it last.

    Raises:
        ConfigurationError: the target's shape fits neither axis.
    """
    wanted, given = prediction.shape[:-1], target.shape
    if given != wanted:
        torch_wanted = prediction.shape[:1] + prediction.shape[2:]
        if given == (*wanted, 1):
            target = target.squeeze(-1)
        elif given == torch_wanted:
            prediction = prediction.movedim(1, -1)
        elif given == (*prediction.shape[:1], 1, *prediction.shape[2:]):
            prediction, target = prediction.movedim(1, -1), target.squeeze(1)
        else:
            raise ConfigurationError(
                f"A target of shape {tuple(given)} doesn't label predictions of shape "
                f"{tuple(prediction.shape)}: class indices of shape {tuple(wanted)} fit "
                f"(classes last) or {tuple(torch_wanted)} (classes in axis 1)."
            )
    return _indexed(prediction, target)


def index_lists(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    """Return lists of class indices, ended by -1, for scores of the same shape (N, C): int64.

    Raises:
        ConfigurationError: the shapes differ.
    """
    if prediction.shape != target.shape:
        raise _different_shapes(prediction, target)
    return _indexed(prediction, target)


def _reshaped(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    ours, theirs = prediction.shape, target.shape
    if ours == (*theirs, 1) or (*ours, 1) == theirs:
        return target.reshape(ours)
    raise _different_shapes(prediction, target)


def _different_shapes(prediction: torch.Tensor, target: torch.Tensor) -> ConfigurationError:
    return ConfigurationError(
        f"The prediction has shape {tuple(prediction.shape)}, the target {tuple(target.shape)}: "
        "this loss compares value with value, so the shapes must agree (torch would broadcast "
        "them where it can). Reshape the target, or give the net an output of its shape.",
        code="FK011",
    )


def full(prediction: torch.Tensor) -> torch.Tensor:
    """Return a half-precision prediction as float32; others as they are."""
    return prediction.float() if prediction.dtype in HALF_TYPES else prediction


def _one_type(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    if prediction.dtype in HALF_TYPES:
        prediction = prediction.float()
    if target.dtype is not prediction.dtype:
        target = target.to(prediction.dtype)
    return prediction, target


def _indexed(prediction: torch.Tensor, target: torch.Tensor) -> Pair:
    if target.dtype is not torch.int64:
        if target.is_floating_point():
            _check_whole(target)
        target = target.to(torch.int64)
    return full(prediction), target


def _check_whole(target: torch.Tensor) -> None:
    """Refuse class indices with fractions, which would be cut off. Those on a device aren't read,
    because it would have to be waited for.
    """
    if not target.is_cpu or torch.compiler.is_compiling():
        return
    if bool((target != target.round()).any()):
        raise ConfigurationError(
            f"This loss takes class indices, but targets of shape {tuple(target.shape)} have "
            "fractions. Pass whole numbers, or class probabilities in the predictions' shape "
            "where the loss takes them.",
            code="FK009",
        )


def weighted_mean(
    values: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ weight·value / N: Keras's mean, which divides by the number of samples.

    Values beyond the weight's dimensions are averaged first. So a weight for each sample, (N,),
    weighs the sample's mean loss; one for each position, (N, T), weighs positions, and N·T divides.

    Args:
        values: unreduced losses (N, ...).
        weight: (N,) or (N, 1), or as many of the values' first dimensions as it has.
        divisor: what divides the sum over all values, where the mean without weights isn't over
            their number (ignored labels, classes' weights). Weights of 1 give that mean.

    Raises:
        ConfigurationError: the weight's shape isn't the start of the values' shape.
    """
    values = full(values)
    if weight.shape != values.shape:
        weight = _aligned(values, weight)
    if weight.dtype is not values.dtype:
        # float64 weights come down to the values' float32, others go up.
        weight = weight.to(values.dtype)
    if weight.ndim < values.ndim:
        values = values.flatten(weight.ndim)
        values = values.mean(-1) if divisor is None else values.sum(-1)
    if divisor is None:
        return (values * weight).mean()
    return mean_over((values * weight).sum(), divisor)


def mean_over(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mean of what was added up, (): NaN if nothing counts, with gradients of 0."""
    return torch.where(count > 0, total / (count + (count == 0)), torch.nan)


def _aligned(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the shape of the values' first dimensions."""
    shape = tuple(weight.shape)
    count = values.shape[0]
    fits = weight.shape == values.shape[: weight.ndim]
    if not fits and weight.ndim > 1 and weight.shape[0] == weight.numel() == count:
        weight = weight.reshape(-1)  # (N, 1) → (N,)
    if weight.ndim == 0 or weight.shape != values.shape[: weight.ndim]:
        raise ConfigurationError(
            f"sample_weight of shape {shape} doesn't fit losses of shape {tuple(values.shape)}. "
            f"Give one weight per sample, shape ({count},), or one per position."
        )
    return weight


# ---- formulas: of matched pairs, in float32 at least; one value per sample or per position ----

LossFunction = Callable[..., torch.Tensor]

EPSILON = 1e-7
"""`keras.config.epsilon()`: the least probability, the least divisor."""


class SumPerSample:
    """A loss function that gives, for each sample, the sum of what another one gives."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def __call__(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = self.function(prediction, target)
        return values if values.ndim == 1 else values.flatten(1).sum(1)  # (N,)


class CountedLabels:
    """What torch's mean over class indices divides by: ignored ones don't count, and each of the
    others counts by its class's weight.

    Args:
        ignore_index: the label that doesn't count.
        module: the torch.nn loss whose `weight` holds the classes' weights; None for none.
    """

    def __init__(self, ignore_index: int, module: nn.Module | None = None) -> None:
        self._ignore_index = ignore_index
        self._module = module

    @property
    def has_weights(self) -> bool:
        """Whether labels count by weights of their classes."""
        return getattr(self._module, "weight", None) is not None

    def counts_all(self, target: torch.Tensor) -> bool:
        """Whether each label counts as 1; read from the device."""
        if self.has_weights:
            return False
        if not target.numel():
            return True
        above = bool(target.min() > self._ignore_index)  # which takes a sixth of comparing each
        return above or not bool((target == self._ignore_index).any())

    def __call__(self, target: torch.Tensor) -> torch.Tensor:
        """Return the sum of the labels' weights, without dimensions. Shapes: int64 (N, ...)."""
        counts = target != self._ignore_index
        weight = getattr(self._module, "weight", None)
        if weight is None:
            return counts.sum()
        labels = torch.where(counts, target, 0).to(weight.device, torch.int64)
        return (weight[labels] * counts.to(weight.device)).sum()


def torch_binary_cross_entropy(
    prediction: torch.Tensor, target: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """`F.binary_cross_entropy`, also within a bfloat16 autocast.

    CUDA's autocast refuses the function because float16 gradients overflow; bfloat16 has
    float32's range, so there the refusal has no ground. A float16 autocast still refuses.
    """
    device = prediction.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
        with torch.autocast(device, enabled=False):
            full, target = prediction.float(), target.float()
            return F.binary_cross_entropy(full, target, reduction=reduction)
    return F.binary_cross_entropy(prediction, target, reduction=reduction)
