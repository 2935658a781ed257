"""One output's loss, whatever it was given as: a name, a torch.nn loss, a function."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fitkit.accelerators import exact_count, move
from fitkit.arguments import callable_name, check_takes_pair, describe, is_torchs, snake_case
from fitkit.errors import ArgumentTypeError, ConfigurationError, FitkitError, warn
from fitkit.losses import guards
from fitkit.losses.formulas import (
    HALF_TYPES,
    full,
    mean_over,
    weighted_mean,
)
from fitkit.losses.names import LOSSES, TORCH_FUNCTIONS, Definition, known_module, unreduced
from fitkit.outputs import IGNORED, SINGLE, LossHint, named_outputs, scale_of
from fitkit.trees import cloned, leaves

if TYPE_CHECKING:
    from fitkit.extras.class_labels import Labels

Count = float | torch.Tensor | None
"""What a mean was taken over: a number, a tensor () on the device, or None for the samples."""
Ask = Callable[[Callable[..., Any]], Any]
"""Calls another net as a batch's forward calls the trained one, once a batch."""


def checked_count(count: Any, what: str) -> float | torch.Tensor:
    """Return what a loss is the mean over, as a number or a tensor on its device.

    Raises:
        ConfigurationError: it isn't one number from 0.
    """
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        count = exact_count(count.detach().reshape(()))
        if isinstance(count, torch.Tensor):
            return count
    if isinstance(count, bool) or not isinstance(count, numbers.Real):
        raise ConfigurationError(
            f"{what}={describe(count)}. It must be one number: how many labels (or samples, or "
            "their weights) the loss is the mean over."
        )
    if not 0 <= float(count) < math.inf:
        raise ConfigurationError(
            f"{what}={describe(count)}. It must be a finite number, 0 or more."
        )
    return count if isinstance(count, (int, float)) else float(count)


class Loss(abc.ABC):
    """One output's loss.

    Attributes:
        name: as given, for a name; a function's own; a module's class in snake case.
        hint: what it says about predictions and task.
        label: how messages call it.
        takes_whole: given once, it gets what the net returned, with all outputs at once.
        takes_inputs: whether it calls other nets with a batch's inputs; see `asking`.
        ignored: the label that doesn't count.
        may_be_nan: whether its mean over nothing has NaNs for gradients.
    """

    name: str
    hint: LossHint
    label: str
    takes_whole = False
    takes_inputs = False
    may_be_nan = False
    ignored: Any = IGNORED

    @property
    def has_user_code(self) -> bool:
        """Whether code of the user's acts in its call, or keeps what is in it."""
        return True

    @property
    def parts(self) -> list[tuple[Loss, float]]:
        """The losses that it is the sum of, each with its factor."""
        return [(self, 1.0)]

    def asking(self, ask: Ask, output: Hashable) -> Loss:
        """Return this loss for one batch, where it takes inputs.

        Args:
            ask: gives another net's outputs for the batch.
            output: the name of the output that it is for.
        """
        return self

    @abc.abstractmethod
    def __call__(self, prediction: Any, target: Any) -> torch.Tensor:
        """Return the mean over the batch, without dimensions."""

    @abc.abstractmethod
    def per_sample(self, prediction: Any, target: Any) -> torch.Tensor:
        """Return the values before the mean, (N, ...), for weights.

        Raises:
            ConfigurationError: the loss gives only its mean.
        """

    def weighted(self, prediction: Any, target: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return the mean over the batch under sample weights (`formulas.weighted_mean`).

        Raises:
            ConfigurationError: the loss gives only its mean, or the weights' shape doesn't fit.
        """
        return weighted_mean(self.per_sample(prediction, target), weight)

    @abc.abstractmethod
    def check(self, prediction: Any, target: Any) -> None:
        """Refuse a first batch that this loss can't mean anything for.

        Raises:
            ConfigurationError: with what was found and what to write instead.
        """

    def tell_sum(self, prediction: Any, target: Any) -> None:
        """Warn if a batch's value, just computed, is a sum over samples: batches are joined."""

    def count_classes(self, prediction: Any, target: Any) -> int | None:
        """Return the number of classes where targets are class indices, else None."""
        return None

    def labels(self, prediction: Any, target: Any) -> Labels:
        """How the targets of a first batch are read as class numbers, for class weights.

        Raises:
            ConfigurationError: a sample has no class, or several.
        """
        from fitkit.extras.class_labels import labels_by_values

        return labels_by_values(prediction, target)

    def check_labels(self, target: Any, classes: int | None) -> None:
        """Refuse targets, perhaps those of a whole data set, that are no labels for this loss.

        Called when a first batch's loss is known: it may show what the labels mean.

        Args:
            classes: what `count_classes` gave.
        """
        return  # most losses take any number

    def checks_each(self, classes: int | None) -> bool:
        """Whether `check_labels` must see each batch: nothing else shows a later one's fault.

        Args:
            classes: what `count_classes` gave.
        """
        return False

    def may_count(self, targets: list[Any] | None) -> bool:
        """Whether the mean may be taken over something else than samples.

        Args:
            targets: all that there will be; None where that isn't known.
        """
        return False

    def count(self, prediction: Any, target: Any, classes: int | None = None) -> Count:
        """Return what the mean over a batch was taken over; None for its samples.

        Args:
            prediction: the net's; None for a batch whose forward hasn't run.
            classes: what `count_classes` gave.
        """
        return None

    def counted(
        self, prediction: Any, target: Any, weight: Any, classes: int | None, *, is_part: bool
    ) -> tuple[torch.Tensor, Count]:
        """Return the mean over a batch, and what it was taken over.

        Args:
            weight: the sample weights; None for none.
            classes: what `count_classes` gave.
            is_part: whether the batch is a part of what an update sees: nothing in it may count.
        """
        if weight is None:
            mean = self(prediction, target)
        else:
            mean = self.weighted(prediction, target, weight)
        return mean, self.count(prediction, target, classes)

    def to(self, device: torch.device) -> None:
        """Move class weights and other buffers, where it has some."""
        return  # most have none


class KnownLoss(Loss):
    """A loss whose meaning fitkit knows: a name, a torch.nn loss, a torch function.

    Args:
        definition: its meaning.
        name: what it was called.
        label: how messages call it.
        module: the torch.nn loss, where it is one.
    """

    def __init__(
        self, definition: Definition, name: str, label: str, module: nn.Module | None = None
    ) -> None:
        self.name: str = name
        self.label: str = label
        self.hint: LossHint = definition.hint
        self.ignored = self.ignored if definition.ignore_index is None else definition.ignore_index
        self._definition = definition
        self._match, self._mean, self._each = definition.match, definition.mean, definition.each
        self._counted = definition.counted
        # torch's mean under weights of classes has such where all of them are 0.
        self.may_be_nan: bool = self._counted is not None and self._counted.has_weights
        self._module = module
        self._has_warned = False

    @property
    def has_user_code(self) -> bool:
        module = self._module
        return module is not None and not (is_torchs(module) and not _has_any_global_hook())

    def __call__(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        prediction, target = self._match(prediction, target)
        if self._mean is not None:
            return self._mean(prediction, target)
        values = self._each(prediction, target)
        if self._counted is None or target.is_floating_point():
            return values.mean()
        return mean_over(full(values).sum(), self._counted(target))

    def per_sample(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        prediction, target = self._match(prediction, target)
        return self._each(prediction, target)

    def weighted(
        self, prediction: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        prediction, target = self._match(prediction, target)
        values = self._each(prediction, target)
        if self._counted is None or target.is_floating_point():
            return weighted_mean(values, weight)
        return weighted_mean(values, weight, self._counted(target))

    def of_each(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Each sample's loss (N,), whose mean is the loss where `joins`."""
        prediction, target = self._match(prediction, target)
        values = self._each(prediction, target)
        return values if values.ndim == 1 else values.flatten(1).mean(1)

    def may_count(self, targets: list[Any] | None) -> bool:
        if self._counted is None:
            return False
        known = targets and all(isinstance(target, torch.Tensor) for target in targets)
        return not known or not all(self._counted.counts_all(target) for target in targets or ())

    def count(self, prediction: Any, target: Any, classes: int | None = None) -> Count:
        if self._counted is None:
            return None
        if not _are_indices(prediction, target, classes):
            # Probabilities (N, C, ...) count as their labels would: other batches may have these.
            return target.numel() // target.shape[1] if target.ndim > 1 and len(target) else None
        return self._counted(torch.as_tensor(target))

    def counted(
        self, prediction: Any, target: Any, weight: Any, classes: int | None, *, is_part: bool
    ) -> tuple[torch.Tensor, Count]:
        counted = self._counted
        is_plain = not is_part or counted is None or not counted.has_weights
        if is_plain or counted is None or not _are_indices(prediction, target, classes):
            return super().counted(prediction, target, weight, classes, is_part=is_part)
        count, values = counted(target), self.per_sample(prediction, target)
        if weight is None:
            return mean_over(values.sum(), count), count
        return weighted_mean(values, weight, count), count

    def joins(self, target: torch.Tensor) -> bool:
        """Whether the loss is the mean of `of_each`, whichever of these targets come together.

        For this, no target is ignored, no weights of the loss itself may be meant for places in a
        batch, and none of the user's code acts in it.
        """
        weighs = self._module is not None and any(True for _ in self._module.buffers())
        if weighs or self.has_user_code or not self._definition.joins:
            return False
        return self._counted is None or self._counted.counts_all(target)

    def check(self, prediction: Any, target: Any) -> None:
        guards.check_batch(self._definition, self.label, prediction, target)
        if self._has_warned or prediction.numel() == 0:
            return
        suspicion = guards.suspicion(self._definition, self.label, prediction)
        if suspicion:
            self._has_warned = True
            warn(suspicion)

    def count_classes(self, prediction: Any, target: Any) -> int | None:
        return guards.count_classes(self._definition, prediction, target)

    def labels(self, prediction: Any, target: Any) -> Labels:
        from fitkit.extras.class_labels import known_labels

        return known_labels(self._definition, prediction, target)

    def check_labels(self, target: Any, classes: int | None) -> None:
        guards.check_labels(self._definition, self.label, torch.as_tensor(target), classes)

    def checks_each(self, classes: int | None) -> bool:
        return guards.takes_any_number(self._definition, classes)

    def to(self, device: torch.device) -> None:
        if self._module is not None:
            move(self._module, device)


class CustomLoss(Loss):
    """A function or module of the user's, called with `(prediction, target)`.

    It may give a scalar, or values per sample, whose mean is taken. A value of 0 whose label is
    ignored doesn't count. A module with an attribute `reduction` gives values per sample, for
    weights, with that set to `"none"`.

    A half-precision prediction beside a target of another floating type goes up to float32: some
    of torch's losses have no gradient for a pair of two types.
    """

    takes_whole = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.hint: LossHint = LossHint()
        self.name: str = callable_name(function)
        self.label: str = f"The loss {self.name}"
        self._function = function
        self._each = function
        self.ignored: Any = getattr(function, "ignore_index", IGNORED)
        self._has_warned = False
        self._sums: bool | None = None  # whether it does, once known
        self._gives_one = False  # a number for a batch, the last time
        self._per_label: float | None = None  # the values that it gave for each label
        self._dims = 0  # how many more a prediction had than its target, when that was checked
        if isinstance(function, nn.Module) and isinstance(
            getattr(function, "reduction", None), str
        ):
            self._each = unreduced(function)
        check_takes_pair(function, self.label, "loss")

    def __call__(self, prediction: Any, target: Any) -> torch.Tensor:
        return self.counted(prediction, target, None, None, is_part=False)[0]

    def may_count(self, targets: list[Any] | None) -> bool:
        return True

    def counted(
        self, prediction: Any, target: Any, weight: Any, classes: int | None, *, is_part: bool
    ) -> tuple[torch.Tensor, Count]:
        if _dims_beside(prediction, target) != self._dims and not torch.compiler.is_compiling():
            self._check_pairs(prediction, target)
        given, target = target, cloned(target)  # the function may write into it
        if weight is not None:
            values = self._values(prediction, target)
            divisor = self._counted_values(values, target)
            return weighted_mean(values, weight, divisor), divisor
        result = self._call(self._function, prediction, target)
        if not result.requires_grad:
            self._check_detached(prediction)
        self._gives_one = result.ndim == 0
        if result.ndim:
            is_tensor = isinstance(target, torch.Tensor) and target.numel() > 0
            self._per_label = result.numel() / target.numel() if is_tensor else None
            count = self._counted_values(result, target)
            if count is None:
                return result.mean(), result.numel()
            return mean_over(full(result).sum(), count), count
        if is_part and self._is_sum(prediction, given):
            from fitkit.extras.summing_losses import sums_over_samples

            raise ConfigurationError(sums_over_samples(self.label), code="FK061")
        return result, None

    def tell_sum(self, prediction: Any, target: Any) -> None:
        if self._gives_one and self._is_sum(prediction, target):
            from fitkit.extras.summing_losses import sum_of_batches

            warn(sum_of_batches(self.label))

    def _is_sum(self, prediction: Any, target: Any) -> bool:
        """Whether the function sums over samples. It is asked once."""
        if self._sums is None:
            from fitkit.extras.summing_losses import sums

            self._sums = sums(self._function, prediction, target)
        return self._sums

    def count(self, prediction: Any, target: Any, classes: int | None = None) -> Count:
        """As of all losses. Of a batch to come it says so many values a label as the last had."""
        if self._per_label is None or not isinstance(target, torch.Tensor):
            return None
        if self._per_label == 1 and is_labels(target) and isinstance(self.ignored, int):
            return (target != self.ignored).sum()
        return target.numel() * self._per_label

    def weighted(self, prediction: Any, target: Any, weight: torch.Tensor) -> torch.Tensor:
        return self.counted(prediction, target, weight, None, is_part=False)[0]

    def _counted_values(self, values: torch.Tensor, target: Any) -> torch.Tensor | None:
        """How many values count where labels may be ignored; None where all do."""
        fits = is_labels(target) and target.numel() == values.numel()
        if not fits or not isinstance(self.ignored, int):
            return None
        return ((target.reshape(values.shape) != self.ignored) | (values != 0)).sum()

    def per_sample(self, prediction: Any, target: Any) -> torch.Tensor:
        return self._values(prediction, cloned(target))

    def _values(self, prediction: Any, target: Any) -> torch.Tensor:
        result = self._call(self._each, prediction, target)
        if result.ndim == 0:
            raise ConfigurationError(
                f"{self.label} gives one number for the whole batch, but sample and class weights "
                "need one per sample. Let it return its values before the mean, shape (N,); "
                "fitkit takes the mean itself."
            )
        return result

    def check(self, prediction: Any, target: Any) -> None:
        self._check_pairs(prediction, target)
        # Kept for evaluations, in which there is no graph to read it from.
        single = named_outputs(prediction).get(SINGLE)
        self.hint = LossHint(scale_of(single) or self.hint.takes)

    def _check_pairs(self, prediction: Any, target: Any) -> None:
        """Refuse to compare all with all, in the first batch of each number of dimensions."""
        guards.check_broadcast(self.label, self._function, prediction, target)
        self._dims = _dims_beside(prediction, target)

    def check_labels(self, target: Any, classes: int | None) -> None:
        """Warn, once, of labels that may not count in a mean over nobody knows what."""
        if self._has_warned or not self.checks_each(classes):
            return
        labels = [leaf for leaf in leaves(target) if isinstance(leaf, torch.Tensor)]
        labels = [leaf for leaf in labels if not leaf.is_floating_point()]
        if any(bool((leaf == self.ignored).any()) for leaf in labels):
            self._has_warned = True
            warn(
                f"{self.label} gives one number for a batch that has labels of {self.ignored}. "
                "If these don't count in it, fitkit can't tell what its mean is taken over. It "
                "weights batches by their samples, so the result depends on how they are cut. "
                "Let the loss return its values before the mean, for the labels that count. "
                "fitkit takes the mean."
            )

    def checks_each(self, classes: int | None) -> bool:
        return self._gives_one and isinstance(self.ignored, int)

    def to(self, device: torch.device) -> None:
        if isinstance(self._function, nn.Module):
            move(self._function, device)

    def _call(self, function: Callable[..., Any], prediction: Any, target: Any) -> torch.Tensor:
        if isinstance(prediction, torch.Tensor) and prediction.dtype in HALF_TYPES:
            prediction = _beside(prediction, target)
        try:
            result = function(prediction, target)
        except FitkitError:
            raise
        except Exception as error:
            explanation = guards.explained(error, self.label, prediction, target)
            if explanation is None:
                raise
            raise explanation from error
        if not isinstance(result, torch.Tensor):
            raise ConfigurationError(
                f"{self.label} returned {describe(result)}, but must return a tensor: the mean "
                "loss, or one value per sample."
            )
        return result

    def _check_detached(self, prediction: Any) -> None:
        if torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves(prediction)
        ):
            raise ConfigurationError(
                f"{self.label} returned a tensor that has no gradient with respect to the "
                "prediction. Compute it with torch, without .detach(), .item(), argmax or NumPy."
            )


def _are_indices(prediction: Any, target: Any, classes: int | None) -> bool:
    """Whether targets are class indices. Batches of these and of soft labels may take turns.

    Args:
        prediction: None for a batch whose forward hasn't run. Then it is as in the first batch.
        classes: what `count_classes` gave for the first batch.
    """
    return classes is not None if prediction is None else target.shape != prediction.shape


def _dims_beside(prediction: Any, target: Any) -> int:
    """Return how many more dimensions a prediction has than its target; 0 without tensors."""
    if isinstance(prediction, torch.Tensor) and isinstance(target, torch.Tensor):
        return prediction.ndim - target.ndim
    return 0


def resolve(loss: Any) -> Loss:
    """Return the loss that `loss` stands for.

    Args:
        loss: a name (`names.py`), a `torch.nn` loss or other module, a torch function such as
            `F.mse_loss`, or any callable `(prediction, target)`.

    Raises:
        ConfigurationError: an unknown or ambiguous name, a class where an instance is meant, a
            callable that doesn't take two arguments or takes them in Keras's order. Or a loss
            whose `reduction` is a sum.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        meaning = LOSSES[loss]
        if not isinstance(meaning, Definition):
            return resolve(meaning)
        return KnownLoss(meaning, loss, f"loss={loss!r}")
    if isinstance(loss, type):
        raise ArgumentTypeError(
            f"loss={loss.__name__} is a class. Give an instance: loss={loss.__name__}()."
        )
    _check_reduction(loss)
    if isinstance(loss, nn.Module):
        known = known_module(loss)
        if known is not None:
            class_name = type(loss).__name__
            return KnownLoss(known, snake_case(class_name), f"loss={class_name}()", loss)
    if not callable(loss):
        raise ArgumentTypeError(
            f"loss={describe(loss)} must be a name, a torch.nn loss, or a callable "
            "(prediction, target); or a list or dict of these, one per output."
        )
    function = TORCH_FUNCTIONS.get(loss) if isinstance(loss, Hashable) else None
    if function is not None:
        return KnownLoss(function, loss.__name__, f"loss={loss.__name__}")
    return CustomLoss(loss)


def _check_reduction(loss: Any) -> None:
    """Refuse a loss that says by its attribute `reduction` that it sums.

    Raises:
        ConfigurationError: with what to write instead.
    """
    if getattr(loss, "reduction", None) == "sum":
        raise ConfigurationError(
            f"loss={describe(loss)} has reduction='sum', but fitkit's losses are means over "
            "samples: a sum depends on the batch size and on the number of devices. Write "
            "reduction='mean', or a callable such as "
            "lambda prediction, target: module(prediction, target) / len(target)."
        )


def _beside(prediction: torch.Tensor, target: Any) -> torch.Tensor:
    if not isinstance(target, torch.Tensor) or not target.is_floating_point():
        return prediction
    return prediction if target.dtype is prediction.dtype else prediction.float()


def is_labels(target: Any) -> bool:
    """Whether a target is one tensor of class indices."""
    is_tensor = isinstance(target, torch.Tensor) and target.ndim > 0
    return is_tensor and not target.is_floating_point() and target.dtype is not torch.bool
