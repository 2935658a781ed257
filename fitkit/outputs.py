"""The outputs of a net by name, and what belongs to each of them.

A net returns a tensor, a tuple, a dict, or an object with `.logits` (as Hugging Face models do).
Tuples and dicts may be nested. Losses, metrics and their logs refer to outputs by name. The name is
a dict's key, or `output_0`, `output_1` in a tuple. `b/c` is the entry `c` of the structure `b`. The
only output of a net has the empty name.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from fitkit.errors import ConfigurationError
from fitkit.trees import is_container

SINGLE = ""
"""The name of the only output of a net; logs carry no prefix for it."""

EMPTY_MEAN = float("nan")
"""The value of a mean over nothing: all labels are ignored, or all weights are 0.

`is` tells it from the NaN of a computation.
"""

IGNORED = -100
"""Labels of this value count for nothing, in torch's losses and in Hugging Face's models."""

MOVES_VALUES = frozenset({
    "Alias", "Cat", "Clone", "Expand", "Gather", "Index", "Permute", "ReshapeAlias", "Select",
    "Slice", "Split", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView",
    "Unsqueeze", "View", "AdaptiveAvgPool2D", "AvgPool2D", "Mean",
})  # fmt: skip
"""Operations, by autograd's names, that leave a value's scale unchanged."""
SCALES = {
    **dict.fromkeys(("Sigmoid", "Softmax"), "probabilities"),
    **dict.fromkeys(("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution"), "logits"),
}
"""The scale that a net's last operation produces."""


@dataclasses.dataclass(frozen=True)
class LossHint:
    """What an output's loss says about its numbers. Metrics interpret predictions by it.

    Attributes:
        takes: `"logits"`, `"probabilities"` or `"log_probabilities"`; None if unknown.
        task: `"classes"` (one of C), `"binary"` (each entry yes or no), `"regression"`; None
            if unknown.
        class_axis: the dimension of classes that the loss reads, if several fit: 1 or -1. None if
            it has none, or if unknown.
        is_shifted: whether the prediction at a place in dimension 1 is for the next place's label,
            as in a causal language model.
    """

    takes: str | None = None
    task: str | None = None
    class_axis: int | None = None
    is_shifted: bool = False


def last_operation(prediction: torch.Tensor) -> str | None:
    """Return the operation that produced a prediction, by autograd's name (`"Sigmoid"`, `"Addmm"`).

    None if there is no graph: in an evaluation, or if nothing learns.
    """
    node: Any = prediction.grad_fn
    while node is not None:
        name = re.sub(r"Backward\d*$", "", node.name())
        if name not in MOVES_VALUES or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return None


def class_axis_of(net: torch.nn.Module) -> int | None:
    """Where a net's last layer gives classes: -1 for a linear one, 1 for a convolution, or None."""
    for layer in reversed(list(net.modules())):
        if isinstance(layer, torch.nn.Linear):
            return -1
        if isinstance(layer, torch.nn.modules.conv._ConvNd):
            return 1
        if any(True for _ in layer.children()) or not any(True for _ in layer.parameters()):
            continue
        return None
    return None


def scale_of(prediction: Any) -> str | None:
    """`"logits"` or `"probabilities"`, if the last operation produces one of them; else None."""
    if not isinstance(prediction, torch.Tensor):
        return None
    return SCALES.get(last_operation(prediction) or "")


def _entries(value: Any) -> dict[Any, Any]:
    """Return the entries of a dict, tuple or list, by the keys from which names are made."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or [f"output_{i}" for i in range(len(value))]
        return dict(zip(names, value, strict=True))
    return {}


def is_hugging_face(thing: object) -> bool:
    """Whether a net or its output is of a class of Hugging Face's transformers.

    Such an output may have caches and hidden states beside its logits, which aren't outputs to
    train. Other libraries' outputs have entries of these names with other meanings.
    """
    return of_hugging_face(type(thing))


def of_hugging_face(kind: type) -> bool:
    """Whether a class is one of those. Compiled steps call it while they are traced: torch can
    trace neither a loop over bases nor `sys.modules` while other code imports.
    """
    generic = sys.modules.get("transformers.utils.generic")
    modeling = sys.modules.get("transformers.modeling_utils")
    return (generic is not None and issubclass(kind, generic.ModelOutput)) or (
        modeling is not None and issubclass(kind, modeling.PreTrainedModel)
    )


def named_outputs(prediction: Any) -> dict[Any, Any]:
    """Return the outputs in a net's prediction by name, in order.

    If there are several, the whole prediction comes first, under the name None, and each structure
    of outputs before the outputs in it.

    An output of Hugging Face's has the single output `.logits`. So has an object that is neither a
    tuple nor a dict, and a dict of `"logits"`, alone or with the `"loss"` that the net computed.
    """
    while not isinstance(prediction, torch.Tensor):
        logits = None
        if isinstance(prediction, Mapping) and ("loss" in prediction or len(prediction) == 1):
            logits = prediction.get("logits")
        if is_hugging_face(prediction) or not isinstance(prediction, (tuple, list, Mapping)):
            logits = getattr(prediction, "logits", None)
        if isinstance(logits, torch.Tensor):
            return {SINGLE: logits}
        if not isinstance(prediction, (tuple, list)) or len(prediction) != 1:
            break
        prediction = prediction[0]
    found: dict[Any, Any] = {}
    _add_outputs(found, None if _entries(prediction) else SINGLE, prediction)
    return found


def _add_outputs(found: dict[Any, Any], name: Hashable, value: Any) -> None:
    found[name] = value
    for key, item in _entries(value).items():
        inner = key if name is None else f"{name}/{key}"
        if inner in found:
            raise ConfigurationError(f"Two of the net's outputs have the name {inner!r}.")
        if isinstance(item, torch.Tensor):
            found[inner] = item
        else:
            _add_outputs(found, inner, item)


class Outputs:
    """The names of a net's outputs, and the structures that contain them.

    Args:
        named: the result of `named_outputs`.

    Attributes:
        within: the names in each structure, by key. None is the name of the whole.
        names: the names of the outputs, in order.
    """

    def __init__(self, named: Mapping[Any, Any]) -> None:
        self.within: dict[Any, dict[Any, Any]] = {
            name: {key: key if name is None else f"{name}/{key}" for key in _entries(value)}
            for name, value in named.items()
            if _entries(value)
        }
        self.names: list[Any] = [name for name in named if name not in self.within]
        self._below: dict[Any, list[Any]] = {}
        for name, parts in reversed(self.within.items()):  # those within others first
            inner = [(child, *self.below(child)) for child in parts.values()]
            self._below[name] = [found for names in inner for found in names]

    def below(self, name: Hashable) -> list[Any]:
        """Return the names of everything in a structure, at any depth; none for an output."""
        return self._below.get(name, [])

    def outputs_in(self, name: Hashable) -> list[Any]:
        """Return the names of the outputs in a structure, at any depth."""
        return [child for child in self.below(name) if child not in self.within]

    def by_position(
        self, name: Hashable, given: Sequence[Any], *, spreads: bool = False
    ) -> list[tuple[Any, Any]] | None:
        """Return the entries of a list for the parts of a structure, or for the outputs in it.

        Args:
            name: the structure's name.
            given: the list's entries.
            spreads: whether one entry may be meant for a whole structure.

        Returns:
            Names and entries; None if there are fewer or more.
        """
        children = list(self.within[name].values())
        if len(given) == len(children) and (
            spreads
            or all(
                item is None or is_container(item) or child not in self.within
                for child, item in zip(children, given, strict=True)
            )
        ):
            return list(zip(children, given, strict=True))
        outputs = self.outputs_in(name)
        return list(zip(outputs, given, strict=True)) if len(given) == len(outputs) else None


def by_output(
    value: Any,
    outputs: Outputs,
    what: str,
    trained: Sequence[Any] = (),
    *,
    needed: Collection[Any] | None = None,
    spreads: bool = False,
    entries: str = "entries",
) -> dict[Any, Any]:
    """Return the values that belong to each output, and to each structure of outputs, by name.

    Args:
        value: for a single output, its value (or a list or dict of one). A list of several is such
            a value. For several outputs, a list in their order or a dict by their names, nested as
            the outputs are. Or one flat list. A dict may leave out some.
        outputs: the net's outputs.
        what: the name of `value` for the message ("loss", "target").
        trained: the outputs that have a loss. A list of so many entries belongs to them, in order.
        needed: the names that are asked for. For others, `value` may have any structure. None:
            all.
        spreads: whether a single value for a structure of outputs belongs to each of them.
        entries: what a list holds, for the message.

    Raises:
        ConfigurationError: a name that no output has, or a list of another length.
    """
    if len(outputs.names) == 1:
        (only,) = outputs.names
        is_wrapped = isinstance(value, (list, tuple, Mapping)) and len(value) == 1
        if is_wrapped and only == SINGLE:
            return {only: next(iter(value.values() if isinstance(value, Mapping) else value))}
        if only == SINGLE or not (is_wrapped or isinstance(value, Mapping)):
            return {only: value}
    found: dict[Any, Any] = {}

    def refuse(name: Any, wrong: str, advice: str = "") -> None:
        if needed is not None and not any(child in needed for child in outputs.below(name)):
            return
        names = outputs.outputs_in(name)
        at, there = ("", "") if name is None else (f" at {name!r}", " there")
        if advice:
            has = f"the net has {len(names)} outputs{there}: {names}. {advice}"
        else:
            has = f"the net's outputs{there} are {names}."
        raise ConfigurationError(f"{what}{at} {wrong}, but {has}")

    def add(name: Any, value: Any) -> None:
        found[name] = value
        parts = outputs.within.get(name)
        if parts is None or value is None:
            return
        if isinstance(value, Mapping):
            # At the top a key may be a whole name: `b/c`, as in the logs.
            known = outputs.below(name) if name is None else list(parts.values())
            given = {parts.get(key, key): item for key, item in value.items()}
            for child in known:
                if child in given:
                    item = given.pop(child)
                    if child in outputs.within:
                        add(child, item)
                    else:
                        found[child] = item
            if given:
                refuse(name, f"names {[key for key in value if key in given]}")
        elif isinstance(value, (list, tuple)):
            pairs = outputs.by_position(name, value, spreads=spreads)
            if pairs is None and name is None and len(value) == len(trained):
                pairs = list(zip(trained, value, strict=True))
            if pairs is None:
                refuse(
                    name,
                    f"has {len(value)} {entries}",
                    "Give one entry per output, or a dict by name.",
                )
            for child, item in pairs or ():
                add(child, item)
        elif spreads:
            found.update(dict.fromkeys(outputs.below(name), value))
        else:
            kind = type(value).__name__
            advice = "Give a list in that order or a dict by name."
            if what == "target" and name is None:
                first = next(iter(outputs.names))
                advice += f' If it is for one output, write loss={{"{first}": …}}.'
            refuse(name, f"is a {kind}", advice)

    add(None, value)
    return found


def targets_by_output(
    target: Any,
    outputs: Outputs,
    trained: Sequence[Any],
    needed: Collection[Any] | None = None,
) -> dict[Any, Any]:
    """Return the targets by output, and by structure of outputs.

    The only output with a loss gets its target without a name.

    Args:
        target: one target, or lists and dicts with one per output.
        outputs: the net's outputs.
        trained: the names of the outputs with a loss.
        needed: the names that are asked for; None: all.

    Raises:
        ConfigurationError: a name that no output has, or a list of another length.
    """
    if target is None and trained:
        return dict.fromkeys(trained)
    if len(trained) == 1 and not is_container(target):
        return {trained[0]: target}
    return by_output(target, outputs, "target", trained, needed=needed)


def weights_by_output(
    weight: Any,
    outputs: Outputs,
    trained: Sequence[Any],
    needed: Collection[Any] | None = None,
) -> dict[Any, Any]:
    """Return the sample weights by output. The arguments are those of `targets_by_output`, but one
    tensor weights a whole structure of outputs.
    """
    if weight is None:
        return {}
    found = by_output(weight, outputs, "sample_weight", trained, needed=needed, spreads=True)
    for name in outputs.names if needed is None else needed:
        if is_container(found.get(name)):
            of = f" of the output {name!r}" if name else ""
            raise ConfigurationError(
                f"sample_weight{of} is a {type(found[name]).__name__}. Give one tensor, with one "
                "weight per sample."
            )
    return found


def log_name(output: str, name: str) -> str:
    """Return the key under which an output's loss or metric is logged."""
    return f"{output}_{name}" if output else name
