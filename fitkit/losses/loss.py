"""One output's loss, whatever it was given as: a name, a torch.nn loss, a function, the net's own.

Reference: the meaning of each name is in `names.py`, that of weights in `weights.py`.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.losses import guards, names
from fitkit.losses.broadcasting import check_broadcast
from fitkit.losses.definitions import Definition
from fitkit.losses.modules import known_module, snake_case, unreduced
from fitkit.notices import warn
from fitkit.outputs import LossHint
from fitkit.trees import leaves

_TARGET_NAMES = {"y_true", "y", "target", "targets", "label", "labels", "truth"}
_PREDICTION_NAMES = {
    "y_pred", "y_hat", "prediction", "predictions", "pred", "preds", "output", "outputs",
    "input", "logits",
}  # fmt: skip


class Loss(abc.ABC):
    """One output's loss.

    Attributes:
        name: as given, for a name; a function's own; a module's class in snake case.
        hint: what it tells about predictions and task.
        label: how messages call it.
        takes_whole: given once for several outputs, it gets all of them at once.
    """

    name: str
    hint: LossHint
    label: str
    takes_whole = False

    @abc.abstractmethod
    def __call__(self, prediction: Any, target: Any) -> torch.Tensor:
        """The mean over the batch, without dimensions."""

    @abc.abstractmethod
    def per_sample(self, prediction: Any, target: Any) -> torch.Tensor:
        """The values before the mean, (N, ...), for weights.

        Raises:
            ConfigurationError: the loss gives only its mean.
        """

    @abc.abstractmethod
    def check(self, prediction: Any, target: Any) -> None:
        """Refuse a first batch that this loss can't mean anything for.

        Raises:
            ConfigurationError: with what was found and what to write instead.
        """

    def count_classes(self, prediction: Any, target: Any) -> int | None:
        """The number of classes where targets are class indices, else None."""
        return None

    def check_labels(self, target: Any, classes: int) -> None:
        """Refuse labels, perhaps those of a whole data set, that aren't below `classes`."""
        return  # most losses take no class indices

    def to(self, device: torch.device | str) -> None:
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
        self.name, self.label, self.hint = name, label, definition.hint
        self._definition = definition
        self._match, self._mean, self._each = definition.match, definition.mean, definition.each
        self._module = module
        self._has_warned = False

    def __call__(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        prediction, target = self._match(prediction, target)
        return self._mean(prediction, target)

    def per_sample(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        prediction, target = self._match(prediction, target)
        return self._each(prediction, target)

    def check(self, prediction: Any, target: Any) -> None:
        guards.check_tensors(self.label, prediction, target)
        guards.check_shapes(self._definition, self.label, prediction, target)
        if prediction.numel() == 0:
            return
        self._match(prediction.detach(), target)
        guards.check_values(self._definition, self.label, prediction, target)
        if self._has_warned:
            return
        suspicion = guards.suspicion(self._definition, self.label, prediction)
        if suspicion:
            self._has_warned = True
            warn(suspicion)

    def count_classes(self, prediction: Any, target: Any) -> int | None:
        return guards.count_classes(self._definition, prediction, target)

    def check_labels(self, target: Any, classes: int) -> None:
        guards.check_label_range(
            torch.as_tensor(target), classes, self._definition.ignore_index, self.label
        )

    def to(self, device: torch.device | str) -> None:
        if self._module is not None:
            self._module.to(device)


class CustomLoss(Loss):
    """A function or module of the user's, called with `(prediction, target)`.

    It may give a scalar, or values per sample, whose mean is taken. A module with an attribute
    `reduction` gives values per sample, for weights, with that set to `"none"`.
    """

    takes_whole = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.hint = LossHint()
        self.name = _name_of(function)
        self.label = f"The loss {self.name}"
        self._function = function
        self._each = function
        if isinstance(function, nn.Module) and isinstance(
            getattr(function, "reduction", None), str
        ):
            self._each = unreduced(function)
        _check_signature(self.label, function)

    def __call__(self, prediction: Any, target: Any) -> torch.Tensor:
        result = self._call(self._function, prediction, target)
        if not result.requires_grad:
            self._check_detached(prediction)
        return result.mean() if result.ndim else result

    def per_sample(self, prediction: Any, target: Any) -> torch.Tensor:
        result = self._call(self._each, prediction, target)
        if result.ndim == 0:
            raise ConfigurationError(
                f"{self.label} gives one number for the whole batch, but sample and class weights "
                "need one a sample. Let it return its values before the mean, shape (N,); "
                "fitkit takes the mean itself."
            )
        return result

    def check(self, prediction: Any, target: Any) -> None:
        check_broadcast(self.label, self._function, prediction, target)

    def to(self, device: torch.device | str) -> None:
        if isinstance(self._function, nn.Module):
            self._function.to(device)

    def _call(self, function: Callable[..., Any], prediction: Any, target: Any) -> torch.Tensor:
        try:
            result = function(prediction, target)
        except Exception as error:
            if target is not None:
                raise
            raise ConfigurationError(
                f"{self.label} failed without a target ({type(error).__name__}: {error}): y is "
                "missing. Pass y, or give batches of (x, y)."
            ) from error
        if not isinstance(result, torch.Tensor):
            raise ConfigurationError(
                f"{self.label} returned {describe(result)}, but must return a tensor: the mean "
                "loss, or one value a sample."
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


class OwnLoss(Loss):
    """The loss that the net computes itself, as Hugging Face models given labels do."""

    takes_whole = True

    def __init__(self) -> None:
        self.name, self.label, self.hint = "loss", "The net's own loss", LossHint()

    def __call__(self, prediction: Any, target: Any = None) -> torch.Tensor:
        value = _carried(prediction)
        if value is None:
            raise _nothing_carried(prediction)
        return value.mean() if value.ndim else value

    def per_sample(self, prediction: Any, target: Any = None) -> torch.Tensor:
        value = _carried(prediction)
        if value is None:
            raise _nothing_carried(prediction)
        if value.ndim == 0:
            raise ConfigurationError(
                "The net computes its own loss, one number for the whole batch, so sample and "
                "class weights can't reach it. Give compile a loss, or leave the weights out."
            )
        return value

    def check(self, prediction: Any, target: Any = None) -> None:
        if _carried(prediction) is None:
            raise _nothing_carried(prediction)


def resolve(loss: Any) -> Loss:
    """The loss that `loss` stands for.

    Args:
        loss: a name (`names.py`), a `torch.nn` loss or other module, a torch function such as
            `F.mse_loss`, or any callable `(prediction, target)`.

    Raises:
        ConfigurationError: an unknown or ambiguous name, a class where an instance is meant, a
            callable that doesn't take two arguments or takes them in Keras's order.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        return KnownLoss(names.find(loss), loss, f"loss={loss!r}")
    if isinstance(loss, type):
        raise ArgumentTypeError(
            f"loss={loss.__name__} is a class. Give an instance: loss={loss.__name__}()."
        )
    if isinstance(loss, nn.Module):
        known = known_module(loss)
        if known is not None:
            class_name = type(loss).__name__
            return KnownLoss(known, snake_case(class_name), f"loss={class_name}()", loss)
    if not callable(loss):
        raise ArgumentTypeError(
            f"loss={describe(loss)} must be a name, a torch.nn loss, or a callable "
            "(prediction, target); or a list or dict of these, one an output."
        )
    function = names.torch_function(loss)
    if function is not None:
        return KnownLoss(function, loss.__name__, f"loss={loss.__name__}")
    return CustomLoss(loss)


def _name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # of a functools.partial
    return getattr(inner, "__name__", None) or snake_case(type(inner).__name__)


def _check_signature(label: str, function: Callable[..., Any]) -> None:
    """Refuse a callable that can't take, or seems to swap, `(prediction, target)`."""
    try:
        signature = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        )
    except (TypeError, ValueError):  # builtins have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise ConfigurationError(
            f"{label} takes {signature}, but a loss is called with (prediction, target). Wrap it "
            "in a function of these two."
        ) from None
    first, second = [*signature.parameters, "", ""][:2]
    if first in _TARGET_NAMES and second in _PREDICTION_NAMES:
        raise ConfigurationError(
            f"{label} takes ({first}, {second}), which is Keras's order. fitkit calls losses as "
            "torch does, with (prediction, target): swap the parameters."
        )


def _carried(prediction: Any) -> torch.Tensor | None:
    """The loss in a net's output: its attribute `loss`, or its key."""
    if isinstance(prediction, Mapping):
        value = prediction.get("loss")
    else:
        value = getattr(prediction, "loss", None)
    return value if isinstance(value, torch.Tensor) else None


def _nothing_carried(prediction: Any) -> ConfigurationError:
    if isinstance(prediction, Mapping):
        output = f"{type(prediction).__name__} with the keys {list(prediction)}"
    else:
        is_tensor = isinstance(prediction, torch.Tensor)
        output = describe(prediction) if is_tensor else type(prediction).__name__
    return ConfigurationError(
        f"compile was given no loss, and the net's output ({output}) carries none. "
        "Give compile a loss, such as loss='cross_entropy', or let the net return an object with "
        ".loss (Hugging Face models do when the batch has labels) or a dict with 'loss'."
    )
