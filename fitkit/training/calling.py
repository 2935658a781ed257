"""How a batch's inputs enter a net: as they are, by position, or by keyword."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a net's forward takes."""
    try:
        if inspect.ismethod(forward):
            found = _parameters(forward.__func__)
            takes_self = found and found[0].kind in POSITIONAL
            return list(found[1:] if takes_self else found)
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # TorchScript tells no signature: by position then
        return [inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)]


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """A function's parameters; looking them up takes 100 µs."""
    return tuple(inspect.signature(function).parameters.values())


class Caller:
    """Calls a net with a batch's inputs.

    A tensor is the one input. A tuple or list is several inputs, a dict is inputs by keyword;
    a net that takes a single input gets either of them whole.

    Args:
        forward: the function whose signature decides (`net.forward`).
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = parameters_of(forward)
        kinds = [parameter.kind for parameter in parameters]
        self._spread = inspect.Parameter.VAR_POSITIONAL in kinds
        self._any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
        self._positional = [item for item in parameters if item.kind in POSITIONAL]
        self._names = {item.name for item in parameters if item.kind in NAMED}
        self._required = [
            item.name
            for item in parameters
            if item.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
            and item.default is inspect.Parameter.empty
        ]

    def __call__(self, net: Callable[..., Any], x: Any) -> Any:
        """What `net` gives for the inputs `x`."""
        if isinstance(x, torch.Tensor):
            return net(x)
        if isinstance(x, Mapping):
            return net(**x) if self.by_keyword(x) else net(x)
        if isinstance(x, (tuple, list)) and self.by_position(x):
            return net(*x)
        return net(x)

    def by_keyword(self, x: Mapping[Any, Any]) -> bool:
        """Whether a dict's entries are arguments of their own."""
        if not all(isinstance(key, str) for key in x):
            return False
        if not self._names:
            return self._any_keyword
        if len(self._names) == 1 and not self._any_keyword:
            return False  # a single input takes the dict whole
        keys = set(x)
        if keys.issuperset(self._required) and (keys <= self._names or self._any_keyword):
            return True
        return len(self._required) != 1

    def takes(self, x: Any, name: str) -> bool:
        """Whether inputs enter by keyword, and one of this name may be among them."""
        return name in self._names and isinstance(x, Mapping) and self.by_keyword(x)

    def by_position(self, x: tuple[Any, ...] | list[Any]) -> bool:
        """Whether a tuple's or list's entries are arguments of their own."""
        if self._spread:
            return True
        if len(self._positional) <= 1:
            return False
        # With one required input, a tuple longer than the arguments can only be that input.
        return len(x) <= len(self._positional) or len(self._required) > 1
