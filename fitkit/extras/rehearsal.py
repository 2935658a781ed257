"""A module's own loading code, rehearsed on a shadow whose tensors are on the meta device."""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fitkit.seams.files import Rehearsal


def rehearsed(module: nn.Module, state: Mapping[str, Any]) -> Rehearsal | None:
    """Load a state dict into a shadow of a module, and return how that ended.

    Returns:
        None if that can't be rehearsed: the code needs the module's numbers, for example.
    """
    try:
        made: dict[int, Any] = {}
        shadow = _shadow(module, made)
        for part in shadow.modules():
            _rebind_hooks(part, made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copies into the meta device do nothing
            found: Any = shadow.load_state_dict(state, strict=False)
    except RuntimeError as error:
        first, *lines = str(error).split("\n\t")
        is_torchs = first.startswith("Error(s) in loading state_dict")
        return Rehearsal(errors=tuple(lines)) if is_torchs and lines else None
    except Exception:
        return None
    missing, unexpected = getattr(found, "missing_keys", ()), getattr(found, "unexpected_keys", ())
    return Rehearsal(tuple(missing), tuple(unexpected))


class _CannotBeRehearsedError(Exception):
    """A hook may act on the module itself."""


def _shadow(part: nn.Module, made: dict[int, Any]) -> Any:
    """Return a module with the same code and structure, whose tensors have no numbers."""
    if id(part) in made:
        return made[id(part)]
    new = made[id(part)] = object.__new__(type(part))
    own = vars(new)
    own.update(vars(part))
    own["_modules"] = {
        name: None if inner is None else _shadow(inner, made)
        for name, inner in part._modules.items()
    }
    for held in ("_parameters", "_buffers"):
        tensors = vars(part)[held].items()
        own[held] = {name: None if t is None else _without_numbers(t, made) for name, t in tensors}
    return new


def _without_numbers(tensor: torch.Tensor, made: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in made:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    found: torch.Tensor = made[id(tensor)]
    return found


def _rebind_hooks(part: nn.Module, made: dict[int, Any]) -> None:
    """Let a shadow's hooks act on the shadow."""
    for held in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        hooks = vars(part)[held]
        vars(part)[held] = type(hooks)((key, _rebound(h, made)) for key, h in hooks.items())


def _rebound(hook: Any, made: dict[int, Any]) -> Any:
    function, module = getattr(hook, "hook", hook), None
    if getattr(hook, "with_module", False):
        module = made.get(id(hook.module()))
    if isinstance(function, types.MethodType):
        function = types.MethodType(function.__func__, made.get(id(function.__self__)))
    elif not (isinstance(function, types.FunctionType) and _closes_over_values(function)):
        raise _CannotBeRehearsedError
    return function if module is None else types.MethodType(function, module)


def _closes_over_values(function: types.FunctionType) -> bool:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return all(isinstance(one, (str, int, float, tuple, type(None))) for one in cells)
