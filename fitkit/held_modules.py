"""The modules that an object of the user's is or holds, such as a loss.

They may be in attributes, lists and dicts, in a `functools.partial`, or behind a bound method.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn


class Untrained:
    """A base class for what a loss holds and never trains, such as a teacher. It is passed over."""


_WITHOUT_MODULES = (
    Untrained, torch.Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None),
    type, ModuleType, FunctionType, BuiltinFunctionType, torch.device, torch.dtype,
    torch.utils.data.Dataset, torch.utils.data.DataLoader,
)  # fmt: skip
CONTAINERS = (dict, list, tuple, set, frozenset)


def modules_in(value: Any, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the modules that an object is or holds, however deep, each with the way to it.

    Their submodules come with them. What a closure holds stays hidden.
    """
    seen = set() if seen is None else seen
    if isinstance(value, _WITHOUT_MODULES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield name, value
        return
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, CONTAINERS):
        parts = entries_of(value)
    elif isinstance(value, functools.partial):
        parts = (("", part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        parts = [("", value.__self__)]
    else:
        parts = ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())
    for step, part in parts:
        yield from modules_in(part, name + step, seen)


def entries_of(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a container, each with the way to it."""
    entries = container.items() if isinstance(container, dict) else enumerate(container)
    return ((f"[{key!r}]", part) for key, part in entries)
