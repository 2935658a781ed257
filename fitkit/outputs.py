"""The outputs of a net by name, and what belongs to each of them.

A net gives a tensor, a tuple, a dict, or an object with `.logits` (as Hugging Face models do).
Losses, metrics and their logs speak of outputs by name: a dict's keys, `output_0`, `output_1`
for a tuple, and the empty name for the single output of a net that has one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fitkit.errors import ConfigurationError
from fitkit.trees import is_container

SINGLE = ""
"""The name of the only output of a net; logs carry no prefix for it."""

IGNORED = -100
"""Labels of this value count for nothing, in torch's losses and in Hugging Face's models."""

MOVES_VALUES = frozenset({
    "Alias", "Cat", "Clone", "Expand", "Gather", "Index", "Permute", "ReshapeAlias", "Select",
    "Slice", "Split", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView",
    "Unsqueeze", "View", "AdaptiveAvgPool2D", "AvgPool2D", "Mean",
})  # fmt: skip
"""Operations, as autograd calls them, after which a value's scale is what it was."""
SCALES = {
    **dict.fromkeys(("Sigmoid", "Softmax"), "probabilities"),
    **dict.fromkeys(("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution"), "logits"),
}
"""What a net's last operation makes."""


@dataclasses.dataclass(frozen=True)
class LossHint:
    """What an output's loss says about its numbers; metrics read predictions by it.

    Attributes:
        takes: `"logits"`, `"probabilities"` or `"log_probabilities"`; None where unknown.
        task: `"classes"` (one of C), `"binary"` (each entry yes or no), `"regression"`; None
            where unknown.
        class_axis: the dimension of classes that the loss reads, where several fit: 1 or -1;
            None where it has none, or where unknown.
        is_shifted: whether the prediction at a place of dimension 1 is of the next place's label,
            as a causal language model's is.
    """

    takes: str | None = None
    task: str | None = None
    class_axis: int | None = None
    is_shifted: bool = False


def last_operation(prediction: torch.Tensor) -> str | None:
    """What has made a prediction's values, as autograd calls it (`"Sigmoid"`, `"Addmm"`).

    None where there is no graph: in an evaluation, or where nothing learns.
    """
    node: Any = prediction.grad_fn
    while node is not None:
        name = re.sub(r"Backward\d*$", "", node.name())
        if name not in MOVES_VALUES or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return None


def scale_of(prediction: Any) -> str | None:
    """`"logits"` or `"probabilities"`, where the last operation makes one of them; else None."""
    if not isinstance(prediction, torch.Tensor):
        return None
    return SCALES.get(last_operation(prediction) or "")


def named_outputs(prediction: Any) -> dict[str, Any]:
    """The outputs in a net's prediction by name, in order.

    An object with `.logits` has that single output, and so has a dict of `"logits"`, alone or
    with the `"loss"` that the net computed.
    """
    if isinstance(prediction, torch.Tensor):
        return {SINGLE: prediction}
    logits = getattr(prediction, "logits", None)
    if isinstance(logits, torch.Tensor):
        return {SINGLE: logits}
    if isinstance(prediction, Mapping):
        logits = prediction.get("logits")
        is_single = "loss" in prediction or len(prediction) == 1
        if is_single and isinstance(logits, torch.Tensor):
            return {SINGLE: logits}
        return dict(prediction)
    if isinstance(prediction, (tuple, list)):
        if len(prediction) == 1:
            return {SINGLE: prediction[0]}
        fields = getattr(prediction, "_fields", None)
        names = fields or [f"output_{index}" for index in range(len(prediction))]
        return dict(zip(names, prediction, strict=True))
    return {SINGLE: prediction}


def by_output(
    value: Any, names: Sequence[Any], what: str, trained: Sequence[Any] = ()
) -> dict[Any, Any]:
    """What belongs to each output: `value`, a list or a dict of one entry an output.

    Args:
        value: for the single output the thing itself (or a list or dict of one); for several
            outputs a list in their order or a dict by their names. A dict may leave out some.
        names: the outputs' names.
        what: what `value` is, for the message ("loss", "target").
        trained: the outputs that have a loss; a list of so many entries belongs to them, in order.

    Raises:
        ConfigurationError: names that no output has, or a list of another length.
    """
    if list(names) == [SINGLE]:
        if isinstance(value, Mapping) and len(value) == 1:
            return {SINGLE: next(iter(value.values()))}
        if isinstance(value, (list, tuple)) and len(value) == 1:
            return {SINGLE: value[0]}
        return {SINGLE: value}
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in names]
        if unknown:
            raise ConfigurationError(
                f"{what} names {unknown}, but the net's outputs are {list(names)}."
            )
        return {name: value[name] for name in names if name in value}
    if isinstance(value, (list, tuple)):
        if len(value) != len(names) and len(value) == len(trained):
            return dict(zip(trained, value, strict=True))
        if len(value) != len(names):
            raise ConfigurationError(
                f"{what} has {len(value)} entries, but the net has {len(names)} outputs: "
                f"{list(names)}. Give one entry an output, or a dict by name."
            )
        return dict(zip(names, value, strict=True))
    raise ConfigurationError(
        f"{what} is a {type(value).__name__}, but the net has {len(names)} outputs: {list(names)}. "
        "Give a list in that order or a dict by name."
    )


def targets_by_output(
    target: Any, outputs: Sequence[Any], trained: Sequence[Any]
) -> dict[Any, Any]:
    """The target of each output that has one.

    A net's only output, or the only one that has a loss, takes its target without a name.

    Args:
        target: one target, or a list or dict of one an output.
        outputs: the outputs' names.
        trained: those of them that have a loss.

    Raises:
        ConfigurationError: names that no output has, or a list of another length.
    """
    if target is None and trained:
        return dict.fromkeys(trained)
    lone = next((names for names in (trained, outputs) if len(names) == 1), None)
    if lone is not None and not is_container(target):
        return {lone[0]: target}
    by_name = isinstance(target, Mapping) and list(outputs) != [SINGLE]
    if len(outputs) == 1 and not by_name:
        return {outputs[0]: by_output(target, [SINGLE], "target")[SINGLE]}
    return by_output(target, outputs, "target", trained)


def weights_by_output(
    weight: Any, outputs: Sequence[Any], trained: Sequence[Any]
) -> dict[Any, Any]:
    """The sample weights of each output that has some; the arguments are as those of
    `targets_by_output`, but one tensor weighs all outputs."""
    if weight is None:
        return {}
    if not isinstance(weight, (list, tuple, Mapping)):
        return dict.fromkeys(outputs, weight)
    if len(outputs) == 1:
        return {outputs[0]: by_output(weight, [SINGLE], "sample_weight")[SINGLE]}
    return by_output(weight, outputs, "sample_weight", trained)


def log_name(output: str, name: str) -> str:
    """The key under which an output's loss or metric is logged."""
    return f"{output}_{name}" if output else name
