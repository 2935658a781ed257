"""Calls of a loss that only look at it: nothing of them stays."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fitkit.random_states import kept_random_numbers
from fitkit.trees import leaves


@contextlib.contextmanager
def undone(function: Any) -> Iterator[None]:
    """Undo what calls in the block change: random numbers, and the state of a loss.

    That are the attributes of a function or object, of the modules and functions in it, and what a
    function holds from around it. Copies of tensors, arrays and containers take the calls: the
    batch's own graph may hold the originals. Not undone is what a call writes into parameters and
    global variables.
    """
    owners, cells = _held_by(function)
    attributes = [(vars(one), dict(vars(one))) for one in owners]
    contents = [(cell, cell.cell_contents) for cell in cells]
    for current, before in attributes:
        current.update({name: _copied(value) for name, value in before.items()})
    for cell, value in contents:
        cell.cell_contents = _copied(value)
    try:
        with kept_random_numbers():
            yield
    finally:
        for current, before in attributes:
            current.clear()
            current.update(before)
        for cell, value in contents:
            cell.cell_contents = value


def _held_by(function: Any) -> tuple[list[Any], list[types.CellType]]:
    """Return the objects with attributes that a loss consists of, and its functions' cells."""
    owners: dict[int, Any] = {}
    cells: dict[int, types.CellType] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in owners or isinstance(one, (type, types.ModuleType)):
            continue
        if isinstance(one, types.MethodType):
            waiting += [one.__self__, one.__func__]
            continue
        if isinstance(one, functools.partial):
            waiting += filter(callable, leaves([one.func, list(one.args), one.keywords]))
        if isinstance(one, types.FunctionType):
            for cell in one.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    waiting += [cell.cell_contents, *leaves([cell.cell_contents])]
                    cells[id(cell)] = cell
        if hasattr(one, "__dict__") and not isinstance(one, torch.Tensor):
            owners[id(one)] = one
            waiting += filter(callable, leaves(list(vars(one).values())))
    return list(owners.values()), list(cells.values())


def _copied(value: Any) -> Any:
    """Return a copy of what a call may write into; parameters, modules and others as they are."""
    if isinstance(value, torch.Tensor):
        is_held = isinstance(value, nn.Parameter) or value.is_inference()
        return value if is_held else value.detach().clone()
    kind = type(value)
    if kind is dict:
        return {key: _copied(one) for key, one in value.items()}
    if kind is list:
        return [_copied(one) for one in value]
    return value.copy() if kind in (set, deque, np.ndarray) else value
