"""How a model's batches are taken apart: into inputs, targets and weights, and what they count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fitkit import trees
from fitkit.data.batches import unpack_batch
from fitkit.data.to_device import LABEL_KEYS
from fitkit.errors import ConfigurationError
from fitkit.module import Module
from fitkit.samples import counted, counted_in, said_by
from fitkit.training.caller import caller_of
from fitkit.typing import Tree


def labels_inside(x: Tree) -> Any:
    """Return the targets that a dict batch has among its inputs; None if there are none."""
    if isinstance(x, Mapping):
        for key in LABEL_KEYS:
            if key in x:
                return x[key]
    return None


def unpacker_of(model: Module, name: str | None = None) -> Callable[[Any], tuple[Any, Any, Any]]:
    """Return the function that splits a model's batches into inputs, targets and weights.

    This is `unpack_batch`, or one that finds the targets of `compile(target=…)` among a dict's
    entries or an object's attributes. An object goes to the net whole.

    Args:
        name: the data's name for messages; None if the targets may be missing.
    """
    target = model._fitkit.compilation.given.target
    if target is None:
        return unpack_batch
    caller = caller_of(model)
    keys = set(trees.leaves(target))

    def taken_apart(batch: Tree) -> tuple[Any, Any, Any]:
        x, y, weight = unpack_batch(batch)
        if not isinstance(x, Mapping):
            if y is None and keys and all(hasattr(x, str(key)) for key in keys):
                y = trees.map_leaves(lambda key: getattr(x, key), target)
            return x, y, weight
        if y is None and keys <= set(x):
            y = trees.map_leaves(lambda key: x[key], target)
        elif y is None and name is not None:
            raise ConfigurationError(
                f"compile was given target={target!r}, but a batch of {name} has the entries "
                f"{', '.join(map(repr, x))}."
            )
        inputs = {key: value for key, value in x.items() if key not in keys}
        if len(inputs) == 1:
            ((key, value),) = inputs.items()
            return (inputs if caller.takes(inputs, key) else value), y, weight
        return inputs, y, weight

    return taken_apart


def counter_of(model: Module) -> Callable[[Any], int]:
    """Return what counts the samples of a model's batches. Entries that disagree are said once."""
    compilation, doubts = model._fitkit.compilation, model._fitkit.doubts
    speaks = compilation.strategy.collectives.rank == 0
    unpack = None if compilation.given.target is None else unpacker_of(model)

    def samples_of(batch: Tree) -> int:
        if unpack is not None and isinstance(batch, Mapping) and said_by(batch) is None:
            found = counted_in(*unpack(batch)[:2])
        else:
            found = counted(batch)
        if found.doubt is not None:
            doubts.note(found.doubt, speaks=speaks)
        return found.samples

    return samples_of
