"""Callables of the user's: losses and metrics, which take `(prediction, target)`; modules."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from fitkit.errors import ConfigurationError

TARGET_NAMES = frozenset({"y_true", "y", "true", "truth", "target", "targets", "label", "labels"})
PREDICTION_NAMES = frozenset({
    "y_pred", "y_hat", "y_score", "prediction", "predictions", "pred", "preds", "output",
    "outputs", "input", "logits",
})  # fmt: skip


def check_takes_pair(function: Callable[..., Any], label: str, kind: str) -> None:
    """Refuse a callable that can't take, or seems to swap, `(prediction, target)`.

    Args:
        function: a function, a module or any other callable; its own signature tells.
        label: how the message calls it.
        kind: what it was given as: `"loss"`, `"metric"`.

    Raises:
        ConfigurationError: it takes other arguments, or names them in Keras's order.
    """
    try:
        signature = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        )
    except (TypeError, ValueError):  # some callables written in C have none to show
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"{label} takes {signature}, but a {kind} is called with (prediction, target): "
            f"{error}. Wrap it in a function of these two."
        ) from None
    first, second = [*signature.parameters, "", ""][:2]
    if first in TARGET_NAMES and second in PREDICTION_NAMES:
        raise ConfigurationError(
            f"{label} takes ({first}, {second}): the target first, as Keras and scikit-learn do. "
            f"fitkit calls a {kind} as torch does, with (prediction, target): swap the "
            "parameters, or wrap it in a lambda that does."
        )


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers, and no hook of its own acts in its call."""
    return (
        type(module).__module__.startswith("torch.nn.")
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(class_name: str) -> str:
    """`BCEWithLogitsLoss` as `bce_with_logits_loss`, `MeanIoU` as `mean_iou`."""
    return _WORD_STARTS.sub("_", class_name.replace("IoU", "Iou")).lower()


def callable_name(function: Callable[..., Any]) -> str:
    """A function's name, the name inside a partial, or an object's class in snake case."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return snake_case(type(function).__name__)
    return "lambda" if name == "<lambda>" else name
