"""Pickles: for machines without the accelerator, and for workers, of others' objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from fitkit.accelerators import is_accelerator

_AS_THEY_ARE = (type, FunctionType, BuiltinFunctionType, ModuleType)

REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
"""How objects of a class travel to workers, if their own `__reduce__` would lose something.

A function returns what `__reduce__` would. It holds for subclasses, too.
"""


class MadeAnew:
    """What belongs to one model in one process: copies, pickles and ranks get a new one.

    Example:
        >>> import copy
        >>> from fitkit.pickling import MadeAnew
        >>> class Seen(MadeAnew):
        ...     def __init__(self):
        ...         self.calls = []
        >>> seen = Seen()
        >>> seen.calls.append(1)
        >>> copy.deepcopy(seen).calls
        []
    """

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return type(self), ()


def reduced_for_workers(value: object) -> tuple[Any, ...] | None:
    """How a value travels by `REDUCERS`; None if they don't say."""
    for kind, reduce in REDUCERS.items():
        if isinstance(value, kind):
            return reduce(value)
    return None


def in_main_memory(value: Any) -> Any:
    """Return a copy of a value whose tensors are in main memory. Functions and classes stay the
    same.

    Args:
        value: what can be pickled. Tensors that are in main memory aren't copied. A parameter that
            occurs twice still does.

    Raises:
        Exception: as `pickle.dumps` raises it.
    """
    buffer = io.BytesIO()
    apart = _Apart(buffer)
    apart.dump(value)
    return Together(io.BytesIO(buffer.getvalue()), apart.kept).load()


class _Apart(pickle.Pickler):
    """Keeps tensors, functions and classes out of the pickle, and these in a list."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, (torch.Tensor, *_AS_THEY_ARE)):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.kept)
            self.kept.append(_moved(value) if isinstance(value, torch.Tensor) else value)
        return self._places[id(value)]


class Together(pickle.Unpickler):
    """Loads a pickle of which some objects were kept apart, in a list."""

    def __init__(self, buffer: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(buffer)
        self._kept = kept

    def persistent_load(self, place: int) -> Any:
        return self._kept[place]


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    if not is_accelerator(tensor.device) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor
    moved = tensor.detach().cpu()
    if type(tensor) is torch.nn.Parameter:
        moved = torch.nn.Parameter(moved)
    vars(moved).update(vars(tensor))
    return moved.requires_grad_(tensor.requires_grad)
