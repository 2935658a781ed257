"""Losses, metrics and optimizers of Keras, as what fitkit's `compile` takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fitkit.extras import keras_backend  # noqa: F401

# isort: split
import keras
import torch

from fitkit.errors import ConfigurationError
from fitkit.seams.metrics import METRICS
from fitkit.seams.optimizers import OPTIMIZERS

UNUSUAL = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)
"""Settings of Keras's optimizers that torch's lack, or that `compile` has."""


def translated(argument: str, value: Any) -> Any:
    """Return an object of Keras as an argument of `compile` takes it.

    Args:
        argument: the argument's name.
        value: the object.

    Raises:
        ConfigurationError: there is no equal one; with what to write.
    """
    if isinstance(value, keras.optimizers.Optimizer):
        return optimizer_like(value)
    if isinstance(value, keras.losses.Loss):
        return loss_like(value)
    if isinstance(value, keras.metrics.Metric):
        return metric_like(value)
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        raise ConfigurationError(
            f"{argument} is keras.optimizers.schedules.{type(value).__name__}. Give compile the "
            "first rate as learning_rate, and a schedule of torch's as lr_scheduler.",
            code="FK082",
        )
    return value


def optimizer_like(optimizer: Any) -> partial[Any]:
    """torch's optimizer of the same updates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "keras.optimizers.LossScaleOptimizer scales the loss, which fitkit does for "
            "compile(precision='16-mixed'). Give compile the optimizer inside it.",
            code="FK082",
        )
    kinds = type(optimizer).__mro__
    name = kinds[0].__name__.lower()
    unusual = [setting for setting in UNUSUAL if getattr(optimizer, setting, None)]
    rate = optimizer._learning_rate
    is_number = not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    is_keras_s = kinds[0].__module__.startswith("keras.")
    if is_keras_s and name == "sgd" and is_number and not unusual:
        momentum, nesterov = float(optimizer.momentum), bool(optimizer.nesterov)
        return partial(torch.optim.SGD, lr=float(rate), momentum=momentum, nesterov=nesterov)
    what = f"keras.optimizers.{kinds[0].__name__}" if is_keras_s else kinds[0].__name__
    if unusual:
        what = f"{what} with {unusual[0]}"
    names = [kind.__name__.lower() for kind in kinds if kind.__name__.lower() in OPTIMIZERS]
    name = names[0] if names else "adam"
    shown = f", learning_rate={float(rate):g}" if is_number else ", lr_scheduler=…"
    raise ConfigurationError(
        f"{what} makes other updates than torch's optimizers. Write compile({name!r}{shown}) with "
        "torch's settings, and gradient_clip_val for clipping.",
        code="FK082",
    )


def loss_like(loss: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Return a function of prediction and target that gives a loss's values before the mean."""
    if loss.reduction not in ("sum_over_batch_size", "mean"):
        raise ConfigurationError(
            f"keras.losses.{type(loss).__name__} has reduction={loss.reduction!r}, but fitkit "
            "takes means. Leave reduction out.",
            code="FK082",
        )
    if getattr(loss, "ignore_class", None) is not None:
        raise ConfigurationError(
            f"keras.losses.{type(loss).__name__} has ignore_class, which fitkit can't read. Write "
            "torch.nn.CrossEntropyLoss(ignore_index=…), which takes logits.",
            code="FK082",
        )

    def values(prediction: Any, target: Any) -> torch.Tensor:
        with keras.device(str(prediction.device)):
            pair = [keras.ops.convert_to_tensor(one, loss.dtype) for one in (target, prediction)]
            found: torch.Tensor = loss.call(*pair)
        mask = getattr(prediction, "_keras_mask", None)
        # A mean that the loss takes itself, perhaps over what it masks: the mask changes nothing.
        return found if found.ndim or mask is None else found.expand(mask.shape)

    values.__name__ = loss.name or type(loss).__name__
    return values


def metric_like(metric: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Return a function of prediction and target that gives the values whose mean a metric is."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        known = type(metric).__name__
        name = known.lower()
        is_named = name in METRICS and _is_as_by_default(metric)
        advice = f"metrics=[{name!r}]" if is_named else "a torchmetrics object"
        raise ConfigurationError(
            f"keras.metrics.{known} collects batches itself, and fitkit can't join what several "
            f"processes collected by it. Write {advice}.",
            code="FK082",
        )

    def values(prediction: Any, target: Any) -> torch.Tensor:
        with keras.device(str(prediction.device)):
            pair = [keras.ops.convert_to_tensor(one, metric.dtype) for one in (target, prediction)]
            found: torch.Tensor = metric._fn(*pair, **metric._fn_kwargs)
        return found

    values.__name__ = metric.name
    return values


def _is_as_by_default(metric: Any) -> bool:
    """Whether a metric was made without settings, so that its name says all."""
    try:
        plain = type(metric)().get_config()
    except TypeError:
        return False
    found: bool = plain == {**metric.get_config(), "name": plain.get("name")}
    return found
