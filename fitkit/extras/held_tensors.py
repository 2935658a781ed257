"""What a loss or net itself holds is looked at before the data are blamed."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from fitkit.arguments import dtype_name
from fitkit.errors import ConfigurationError


def fault_of_loss(error: BaseException) -> ConfigurationError | None:
    """Return an error about the weights that a loss holds or passes on; None where they fit.

    They are read where torch computes the loss, so that a module of torch's, a class of the user's
    and a function with `weight=…` are looked at alike.
    """
    name, found = "", None
    for frame in _frames(error):
        held, values = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(held, nn.modules.loss._Loss):
            name = type(held).__name__
        is_loss = re.search(r"loss|entropy", frame.f_code.co_name) is not None
        if is_loss and isinstance(values, torch.Tensor) and values.is_floating_point():
            found = _misfit(frame, values, name or frame.f_code.co_name) or found
    return found


def _misfit(frame: FrameType, values: torch.Tensor, name: str) -> ConfigurationError | None:
    """Return what is wrong with the weights of a call of torch's loss functions."""
    is_of_classes = frame.f_code.co_name in ("cross_entropy", "nll_loss", "multi_margin_loss")
    for key in ("weight", "pos_weight"):
        held = frame.f_locals.get(key)
        if not isinstance(held, torch.Tensor):
            continue
        given = f"{name} has {key} of shape {tuple(held.shape)}, {dtype_name(held.dtype)}"
        predicted = f"predictions of shape {tuple(values.shape)}, {dtype_name(values.dtype)}"
        columns = values.shape[1 if is_of_classes and values.ndim > 1 else -1]
        fits = held.shape == (columns,) if is_of_classes else _broadcasts(held, values)
        if not fits:
            rest = "" if is_of_classes else ", or a single one"
            samples = ""
            if key == "weight" and held.shape == values.shape[:1]:
                samples = " For a weight of each sample write fit(sample_weight=…)."
            return ConfigurationError(
                f"{given}, beside {predicted}. Give one number for each of the {columns} "
                f"columns{rest}.{samples}",
                code="FK091",
            )
        if is_of_classes and held.dtype != values.dtype:
            wanted = dtype_name(values.dtype)
            return ConfigurationError(
                f"{given}, beside {predicted}. Make the loss's own numbers of that type: "
                f"{key}=torch.as_tensor({key}, dtype=torch.{wanted}).",
                code="FK002",
            )
    return None


def _broadcasts(held: torch.Tensor, values: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(held.shape, values.shape) == values.shape
    except RuntimeError:
        return False


def fault_of_net(net: Any, layer: nn.Module | None, x: list[torch.Tensor]) -> str | None:
    """Return what to do about number types that clash in a net; None where the data are at fault.

    Args:
        net: the net.
        layer: the layer that raised the error, if one did.
        x: the batch's tensors.
    """
    kinds: Counter[torch.dtype] = Counter()
    homes: dict[torch.dtype, str] = {}
    for name, held in (*net.named_parameters(), *net.named_buffers()):
        if held.is_floating_point():
            kinds[held.dtype] += held.numel()
            homes.setdefault(held.dtype, name.removeprefix("net."))
    given = {one.dtype for one in x if one.is_floating_point()}
    if len(kinds) > 1:
        parts = ", ".join(f"{homes[kind]} is {dtype_name(kind)}" for kind in homes)
        wanted = next((kind for kind in given if kind in kinds), kinds.most_common(1)[0][0])
        return (
            f"The net holds numbers of several types: {parts}. Make them one before compile: "
            f"net.to(torch.{dtype_name(wanted)})."
        )
    own = next(iter(layer.parameters(recurse=False)), None) if layer is not None else None
    if own is not None and given == {own.dtype} and len(x) == 1:
        name = dtype_name(own.dtype)
        return (
            f"x and the layer are both {name}, so forward makes the other type in between. "
            f"Convert there: .to(torch.{name})."
        )
    return None


def fault_of_index(error: BaseException) -> str | None:
    """Return which index a table of embeddings lacks, its size, and what to do."""
    for frame in _frames(error):
        if frame.f_code.co_name not in ("embedding", "embedding_bag"):
            continue
        indices, table = frame.f_locals.get("input"), frame.f_locals.get("weight")
        if not isinstance(indices, torch.Tensor) or not isinstance(table, torch.Tensor):
            continue
        if indices.is_floating_point():  # embedding_bag takes them the other way round, too
            indices, table = table, indices
        size, low, high = len(table), int(indices.min()), int(indices.max())
        has = f"it has {size}, from 0 to {size - 1}, but got"
        if low < 0:
            return (
                f"{has} {low}. If that marks what is missing, give it an index of its own: "
                f"x + {-low} with num_embeddings={max(size, high + 1) - low}."
            )
        return f"{has} {high}. Write num_embeddings={high + 1} or more, or map the index."
    return None


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))
