"""What `compile` was given for a Keras network, as Keras means it: functions of `(y_true, y_pred)`,
and the accuracy that fits an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fitkit.extras import keras_backend  # noqa: F401

# isort: split
import keras
import torch
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import is_binary_or_sparse_categorical

from fitkit import trees
from fitkit.arguments import callable_name, check_takes_pair, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.keras_objects import loss_like, metric_like
from fitkit.registry import Registry, unknown_name
from fitkit.seams.losses import LOSSES
from fitkit.seams.metrics import METRICS, Mean, MetricSpec, Named, as_given

TORCHS = ("fitkit", "torch", "torchaudio", "torchmetrics", "torchvision")
"""Packages whose functions take the prediction first, wherever they are given."""

ACCURACIES = ("accuracy", "acc")
"""The names for which Keras looks at the output and the targets."""


def meant(argument: str, value: Any, outputs: Any = None) -> Any:
    """Return losses or metrics of a Keras network as fitkit calls them.

    Args:
        argument: `"loss"`, `"metrics"` or `"weighted_metrics"`.
        value: what was given.
        outputs: the network's symbolic outputs; None where it has none.

    Raises:
        ConfigurationError: a function takes other arguments, or the prediction first.
        ArgumentTypeError: something is neither a name nor callable.
    """
    trees.map_leaves(partial(_check_type, argument), value)
    if argument == "loss":
        return trees.map_leaves(_of_loss, value)
    return trees.map_leaves(_of_metric, _by_output(value, outputs))


def _check_type(argument: str, value: Any) -> None:
    if value is None or isinstance(value, str) or callable(value):
        return
    kind, library = ("loss", "torch") if argument == "loss" else ("metric", "torchmetrics")
    raise ArgumentTypeError(
        f"{argument} has {describe(value)}, but a {kind} of a "
        f"Keras network is a name, an object of Keras or {library}, or a callable (y_true, y_pred)."
    )


def _by_output(metrics: Any, outputs: Any) -> Any:
    """Return a list of metrics that has one entry for each output as lists of their own.

    Such a list says what each output is measured by, in Keras's order: that of a dict's keys.
    fitkit's own meaning of a list without lists is that each output has all of its metrics.
    """
    if not (
        isinstance(metrics, (list, tuple))
        and isinstance(outputs, (list, tuple, Mapping))
        and len(metrics) == len(outputs) > 1
    ):
        return metrics
    each = [one if one is None or isinstance(one, (list, tuple)) else [one] for one in metrics]
    return dict(zip(sorted(outputs), each, strict=True)) if isinstance(outputs, Mapping) else each


def _of_loss(loss: Any) -> Any:
    if isinstance(loss, str) and loss not in LOSSES:
        loss = _by_keras(keras.losses.get, loss) or _known(LOSSES, loss)  # "dice"
    if isinstance(loss, keras.losses.Loss):
        return loss_like(loss)
    if not _takes_target_first(loss, "loss"):
        return loss
    return loss_like(LossFunctionWrapper(loss, name=callable_name(loss)))


def _of_metric(metric: Any) -> Any:
    if isinstance(metric, str) and metric.strip().lower() in ACCURACIES:
        return MetricSpec(metric.strip(), Named(_accuracy, weightable=True), weighted=False)
    if isinstance(metric, str) and metric not in METRICS:
        found = _by_keras(keras.metrics.get, metric)  # "categorical_hinge"
        if isinstance(found, keras.metrics.MeanMetricWrapper):
            found.name = metric
            return metric_like(found)
        return _known(METRICS, metric)
    return _target_first(metric) if _takes_target_first(metric, "metric") else metric


def _by_keras(get: Callable[[str], Any], name: str) -> Any:
    """Return what Keras has by a name; None where it has nothing that comes without more."""
    try:
        return get(name)
    except (TypeError, ValueError):
        return None


def _known(names: Registry[Any], name: str) -> str:
    """Return a name.

    Raises:
        ConfigurationError: there is none such. It says in which order a function gets its
            arguments here.
    """
    try:
        names[name]
    except ConfigurationError as error:
        if error.code != "FK028":
            raise
        hint = names.hint.replace("(prediction, target)", "(y_true, y_pred)")
        raise unknown_name(names.kind, name, names, hint, names.page) from None
    return name


def _takes_target_first(value: Any, kind: str) -> bool:
    """Whether something is a function that Keras would call.

    Raises:
        ConfigurationError: it can't be called so.
    """
    if not callable(value) or isinstance(value, (type, torch.nn.Module)):
        return False
    function = value
    while isinstance(function, partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    if home.partition(".")[0] in TORCHS:
        return False
    check_takes_pair(value, f"The {kind} {callable_name(value)}", kind, target_first=True)
    return True


def _target_first(function: Callable[..., Any]) -> Callable[[Any, Any], torch.Tensor]:
    def values(prediction: Any, target: Any) -> torch.Tensor:
        with keras.device(str(prediction.device)):
            found: torch.Tensor = keras.ops.cast(
                function(target, prediction), keras.config.floatx()
            )
        return found

    values.__name__ = callable_name(function)
    return values


def _accuracy(first: Any) -> Any:
    if first.hint.takes == "logits":  # only torch's losses say so, and 0.5 would be no boundary
        named: Any = METRICS["accuracy"]
        return named.build(first)
    return Mean(as_given, right)


def right(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return which entries of a prediction are right, by the accuracy that Keras would choose.

    Shapes: an output (N, ..., 1) is compared with 0.5, entry by entry. Of one (N, ..., classes),
    the highest is compared with a class number, or with the highest of targets of its shape.
    """
    is_binary, is_sparse = is_binary_or_sparse_categorical(target, prediction)
    if is_binary:
        if target.shape != prediction.shape and target.numel() == prediction.numel():
            target = target.reshape(prediction.shape)
        return (prediction > 0.5) == target
    if is_sparse and target.ndim == prediction.ndim:
        target = target.squeeze(-1)
    return prediction.argmax(-1) == (target if is_sparse else target.argmax(-1))
