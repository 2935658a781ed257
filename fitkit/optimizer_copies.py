"""What an optimizer holds beside its groups and its state, and how copies of it get that, too.

Torch's `Optimizer.__getstate__` gives copies and pickles the defaults, the groups and the state.
They lack what a class's constructor sets on the object (`LBFGS` and SAM then fail, others compute
with the class's default), an optimizer inside (Lookahead), and the hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Contents = list[tuple[Optimizer, dict[str, Any], dict[str, list[Any]]]]
"""Optimizers, each with its other attributes, and with its hooks by kind."""


def with_inner(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return optimizers and those that they hold in attributes, lists and dicts, each once."""
    found: dict[int, Optimizer] = {}
    waiting = list(optimizers)
    while waiting:
        optimizer = waiting.pop(0)
        if id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            waiting += _optimizers_in(vars(optimizer).values())
    return list(found.values())


def _optimizers_in(values: Iterable[Any]) -> Iterator[Optimizer]:
    for value in values:
        if isinstance(value, Optimizer):
            yield value
        elif type(value) is dict:
            yield from _optimizers_in(value.values())
        elif type(value) in (list, tuple):
            yield from _optimizers_in(value)


_TORCHS_OWN = (
    "_opt_called", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured", "_numel_cache",
)  # fmt: skip


def numbers_of(optimizer: Optimizer) -> dict[str, bool | int | float | torch.Tensor]:
    """Return the numbers and tensors among an optimizer's own attributes, such as a counter."""
    kept = optimizer.__getstate__()
    return {
        name: value
        for name, value in vars(optimizer).items()
        if type(value) in (bool, int, float, torch.Tensor)
        and name not in kept
        and name not in _TORCHS_OWN
    }


@torch.no_grad()
def put_numbers(optimizer: Optimizer, numbers: Mapping[str, Any]) -> None:
    """Give an optimizer's attributes the values that `numbers_of` has returned, of one kind."""
    own = numbers_of(optimizer)
    for name, value in numbers.items():
        current = own.get(name)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            if current.shape == value.shape:
                current.copy_(value)
        elif type(current) is type(value):
            vars(optimizer)[name] = value


def contents_of(optimizers: Iterable[Optimizer]) -> Contents:
    """Return what copies of these optimizers, and of those inside, would lack.

    Left out are a scheduler's wrapper around `step`, and fitkit's own hooks: who needs them sets
    them anew.
    """
    found: Contents = []
    for optimizer in with_inner(optimizers):
        kept = optimizer.__getstate__()
        if not isinstance(kept, dict):  # its class does it otherwise
            continue
        beside = {name: value for name, value in vars(optimizer).items() if name not in kept}
        if _is_wrapper(beside.get("step")):
            del beside["step"]
        hooks = {name: beside.pop(name) for name in list(beside) if _has_hooks(name)}
        others = {
            name: [hook for hook in by_number.values() if not _is_ours(hook)]
            for name, by_number in hooks.items()
        }
        found.append((optimizer, beside, others))
    return found


def put_contents(contents: Contents) -> None:
    """Give copies what `contents_of` has returned.

    Hooks get new numbers: torch numbers them by process, and a later one would replace them.
    """
    for optimizer, beside, hooks in contents:
        vars(optimizer).update(beside)
        for name, given in hooks.items():
            by_number = vars(optimizer)[name] = OrderedDict()
            for hook in given:
                by_number[RemovableHandle(by_number).id] = hook


def _has_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _is_wrapper(step: Any) -> bool:
    return hasattr(step, "_wrapped_by_lr_sched") or _is_ours(step)


def _is_ours(function: Any) -> bool:
    function = getattr(function, "func", function)  # a partial's
    return str(getattr(function, "__module__", "")).startswith("fitkit.")
