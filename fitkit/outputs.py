"""The outputs of a net by name, and what belongs to each of them.

A net gives a tensor, a tuple, a dict, or an object with `.logits` (as Hugging Face models do);
tuples and dicts may stand in one another. Losses, metrics and their logs speak of outputs by name:
a dict's keys, `output_0`, `output_1` for a tuple, `b/c` for what stands at `c` in the structure
`b`, and the empty name for the single output of a net that has one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
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


def _entries(value: Any) -> dict[Any, Any]:
    """What stands in a dict, tuple or list, by the keys of which names are made."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or [f"output_{i}" for i in range(len(value))]
        return dict(zip(names, value, strict=True))
    return {}


def named_outputs(prediction: Any) -> dict[Any, Any]:
    """The outputs in a net's prediction by name, in order.

    Where there are several, the whole prediction comes first, under the name None, and each
    structure of outputs before those that it holds.

    An object with `.logits` has that single output, and so has a dict of `"logits"`, alone or
    with the `"loss"` that the net computed.
    """
    while not isinstance(prediction, torch.Tensor):
        logits = getattr(prediction, "logits", None)
        if isinstance(prediction, Mapping) and ("loss" in prediction or len(prediction) == 1):
            logits = prediction.get("logits")
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
    """The names of a net's outputs, and in which structures they stand.

    Args:
        named: what `named_outputs` gives.

    Attributes:
        within: the names of what each structure holds, by key; None is the whole's name.
        names: of the outputs, in order.
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
        """The names of all that stands in a structure, at any depth; none for an output."""
        return self._below.get(name, [])

    def outputs_in(self, name: Hashable) -> list[Any]:
        """The names of the outputs in a structure, at any depth."""
        return [child for child in self.below(name) if child not in self.within]

    def by_position(
        self, name: Hashable, given: Sequence[Any], *, spreads: bool = False
    ) -> list[tuple[Any, Any]] | None:
        """What a list gives to each part of a structure, or to each output in it.

        Args:
            name: the structure's.
            given: the list's entries.
            spreads: whether one entry may be meant for a whole structure.

        Returns:
            Names and entries; None where there are fewer or more.
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
    """What belongs to each output, and to each structure of outputs, by name.

    Args:
        value: for the single output the thing itself (or a list or dict of one); for several
            outputs lists in their order or dicts by their names, nested as the outputs are, or
            one list without lists inside. A dict may leave out some.
        outputs: the net's.
        what: what `value` is, for the message ("loss", "target").
        trained: the outputs that have a loss; a list of so many entries belongs to them, in order.
        needed: the names that are asked for: below others `value` may be of any structure. None:
            all.
        spreads: whether one thing for a structure of outputs belongs to each of them.
        entries: what a list holds, for the message.

    Raises:
        ConfigurationError: names that no output has, or a list of another length.
    """
    if outputs.names == [SINGLE]:
        if isinstance(value, Mapping) and len(value) == 1:
            return {SINGLE: next(iter(value.values()))}
        if isinstance(value, (list, tuple)) and len(value) == 1:
            return {SINGLE: value[0]}
        return {SINGLE: value}
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
            # At the top a key may be a whole name: `b/c`, as logs have it.
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
            refuse(name, f"is a {kind}", "Give a list in that order or a dict by name.")

    add(None, value)
    return found


def targets_by_output(
    target: Any,
    outputs: Outputs,
    trained: Sequence[Any],
    needed: Collection[Any] | None = None,
) -> dict[Any, Any]:
    """The target of each output, and of each structure of outputs, that has one.

    A net's only output, or the only one that has a loss, takes its target without a name.

    Args:
        target: one target, or lists and dicts of one per output.
        outputs: the net's.
        trained: the names of those that have a loss.
        needed: the names that are asked for; None: all.

    Raises:
        ConfigurationError: names that no output has, or a list of another length.
    """
    if target is None and trained:
        return dict.fromkeys(trained)
    names = outputs.names
    lone = next((found for found in (trained, names) if len(found) == 1), None)
    if lone is not None and not is_container(target):
        return {lone[0]: target}
    is_by_name = isinstance(target, Mapping)
    is_wrapped = isinstance(target, (tuple, list)) and len(target) == 1
    if len(names) == 1 and not is_by_name and not is_wrapped:
        return {names[0]: target}
    return by_output(target, outputs, "target", trained, needed=needed)


def weights_by_output(
    weight: Any,
    outputs: Outputs,
    trained: Sequence[Any],
    needed: Collection[Any] | None = None,
) -> dict[Any, Any]:
    """The sample weights of each output that has some; the arguments are as those of
    `targets_by_output`, but one tensor weighs a whole structure of outputs."""
    if weight is None:
        return {}
    found = by_output(weight, outputs, "sample_weight", trained, needed=needed, spreads=True)
    for name in outputs.names if needed is None else needed:
        if is_container(found.get(name)):
            of = f" of the output {name!r}" if name else ""
            raise ConfigurationError(
                f"sample_weight{of} is a {type(found[name]).__name__}. Give one tensor: a weight a "
                "sample."
            )
    return found


def log_name(output: str, name: str) -> str:
    """The key under which an output's loss or metric is logged."""
    return f"{output}_{name}" if output else name
