"""Whether a stored state fits an optimizer, found out before the optimizer is touched.

`Optimizer.load_state_dict` compares the numbers of groups and parameters, and nothing else: a state
of another shape or optimizer is taken, and the next step fails or, worse, broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fitkit.checkpoint.comparison import listing
from fitkit.checkpoint.dtypes import dtype_name
from fitkit.errors import CheckpointError

# Options that torch has added over the years and fills in where an older state lacks them.
_ADDED_LATER = {
    *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    *("adjust_lr_fn", "initial_accumulator_value"),
}


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Check that `optimizer.load_state_dict(state)` would give a state that the optimizer can use.

    Groups are compared by number, parameters and options; the tensors kept for a parameter by
    name, shape and kind of dtype with those that the optimizer keeps already, and in torch's own
    optimizers, where it keeps none yet, with the parameter.

    Args:
        optimizer: the optimizer; it isn't changed.
        state: what its `state_dict()` once returned.

    Raises:
        CheckpointError: it doesn't fit; the message lists all that doesn't.
    """
    problems = list(_problems(optimizer, state))
    if problems:
        raise CheckpointError(
            f"The stored optimizer state doesn't fit this {type(optimizer).__name__}; nothing was "
            f"loaded.{listing('what differs', problems)}\nBuild the optimizer as the one that was "
            "saved, or load the weights alone with load_weights."
        )


def _problems(optimizer: torch.optim.Optimizer, state: object) -> Iterator[str]:
    if not isinstance(state, dict):
        yield f"it is a {type(state).__name__}, not a dict"
        return
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        yield "its 'param_groups' isn't a list of groups of parameters"
        return
    if not isinstance(entries, dict):
        yield "its 'state' isn't a dict"
        return
    sizes = [len(group["params"]) for group in groups]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != wanted:
        yield f"its groups have {sizes} parameters, the optimizer's {wanted}"
        return
    identities = [identity for group in groups for identity in group["params"]]
    if len(set(identities)) != len(identities):
        yield "one parameter stands in its groups twice"
        return
    yield from _options(optimizer, groups)
    yield from _entries(optimizer, identities, entries)


def _is_group(group: object) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(identity, (int, str)) for identity in group["params"])
    )


def _options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[str]:
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for name in optimizer.defaults:
            if name not in group and name not in _ADDED_LATER:
                yield f"group {index} has no {name!r}, so another kind of optimizer made it"
            elif name in group and not _same_kind(group[name], own.get(name)):
                yield f"group {index} has {name}={group[name]!r}, the optimizer {own.get(name)!r}"


def _same_kind(found: object, own: object) -> bool:
    """Whether an option can stand for another: numbers for numbers, pairs for pairs."""
    if isinstance(found, (tuple, list)) and isinstance(own, (tuple, list)):
        return len(found) == len(own) and all(map(_same_kind, found, own))
    if isinstance(found, (tuple, list)) or isinstance(own, (tuple, list)):
        return False
    numbers = (bool, int, float, torch.Tensor, type(None))
    return isinstance(found, numbers) == isinstance(own, numbers)


def _entries(
    optimizer: torch.optim.Optimizer, identities: list[Any], entries: Mapping[Any, Any]
) -> Iterator[str]:
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    known = dict(zip(identities, parameters, strict=True))
    total = sum(parameter.numel() for parameter in parameters)
    by_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    for identity, entry in entries.items():
        parameter = known.get(identity)
        if parameter is None:
            if isinstance(identity, (int, str)) and by_torch:
                yield f"it keeps something for parameter {identity!r}, which is in no group"
            continue
        if not isinstance(entry, dict):
            yield f"what it keeps for parameter {identity!r} is a {type(entry).__name__}"
            continue
        own = optimizer.state.get(parameter) or {}
        for name in sorted(own.keys() - entry.keys(), key=str):
            if isinstance(own[name], torch.Tensor):
                yield f"parameter {identity!r}: {name!r} is missing"
        for name, value in entry.items():
            reason = _mismatch(value, own.get(name), parameter, total, by_torch)
            if reason:
                yield f"parameter {identity!r}: {name!r} {reason}"


def _mismatch(
    value: object, own: object, parameter: torch.Tensor, total: int, by_torch: bool
) -> str:
    if isinstance(own, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            return f"is a {type(value).__name__}, the optimizer has {_words(own)}"
        fits = value.shape == own.shape and value.is_complex() == own.is_complex()
        return "" if fits else f"is {_words(value)}, the optimizer has {_words(own)}"
    if not isinstance(value, torch.Tensor) or not by_torch:
        return ""
    if not _belongs(tuple(value.shape), tuple(parameter.shape), total):
        return f"is {_words(value)}, the parameter {_words(parameter)}"
    if value.is_complex() and not parameter.is_complex():
        return f"is {_words(value)}, the parameter {_words(parameter)}"
    return ""


def _belongs(shape: tuple[int, ...], parameter: tuple[int, ...], total: int) -> bool:
    """Whether one of torch's optimizers may keep this shape for a parameter of that shape."""
    if shape in ((), (1,), parameter, (total,)):  # LBFGS keeps vectors over all parameters
        return True
    # Adafactor keeps the means over rows and over columns.
    return len(shape) == len(parameter) and shape in (
        (*parameter[:-1], 1),
        (*parameter[:-2], 1, parameter[-1]),
    )


def _words(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
