"""How a net takes a batch's inputs: as one argument, by position or by keyword."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fitkit.guests import guest_of
from fitkit.typing import AnyCallable, Tree

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a net's forward."""
    try:
        if inspect.ismethod(forward):
            found = _parameters(forward.__func__)
            takes_self = found and found[0].kind in POSITIONAL
            return list(found[1:] if takes_self else found)
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # TorchScript has no signature: then by position
        return [inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)]


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return a function's parameters; looking them up takes 100 µs."""
    return tuple(inspect.signature(function).parameters.values())


class Caller:
    """Calls a net with a batch's inputs.

    A tensor is the single input. A tuple or list is several inputs, a dict is inputs by keyword.
    A net that takes a single input gets a tuple, list or dict as a whole.

    Args:
        forward: the function whose signature decides (`net.forward`).
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = signature_of(forward)
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

    def __call__(self, net: Callable[..., Any], x: Tree) -> Any:
        """Call `net` on the inputs `x`."""
        given, named = self.arguments(x)
        return net(*given, **named)

    def arguments(self, x: Tree) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the net's arguments for the inputs `x`: by position, and by keyword."""
        if isinstance(x, Mapping) and self.by_keyword(x):
            return (), x
        if isinstance(x, (tuple, list)) and self.by_position(x):
            return x, {}
        return (x,), {}

    def by_keyword(self, x: Mapping[Any, Any]) -> bool:
        """Whether a dict's entries are separate arguments."""
        if not all(isinstance(key, str) for key in x):
            return False
        if not self._names:
            return self._any_keyword
        if len(self._names) == 1 and not self._any_keyword:
            return False  # a single input takes the whole dict
        keys = set(x)
        if keys.issuperset(self._required) and (keys <= self._names or self._any_keyword):
            return True
        return len(self._required) != 1

    def takes(self, x: Tree, name: str) -> bool:
        """Whether inputs are passed by keyword, and one of this name may be among them."""
        return name in self._names and isinstance(x, Mapping) and self.by_keyword(x)

    def takes_any_keyword(self, x: Tree) -> bool:
        """Whether inputs are passed by keyword, and others may be among them."""
        return self._any_keyword and isinstance(x, Mapping) and self.by_keyword(x)

    def by_position(self, x: tuple[Any, ...] | list[Any]) -> bool:
        """Whether a tuple's or list's entries are separate arguments."""
        if self._spread:
            return True
        if len(self._positional) <= 1:
            return False
        # With one required input, a tuple longer than the arguments can only be that input.
        return len(x) <= len(self._positional) or len(self._required) > 1


def caller_of(model: torch.nn.Module) -> Caller:
    """How the model takes inputs: by the signature of its own forward, or of its net's."""
    net = guest_of(model) or getattr(model, "net", None)
    forward = model.forward
    if isinstance(net, torch.nn.Module) and _spreads(forward):
        forward = net.forward
    return Caller(forward)


def _spreads(forward: AnyCallable) -> bool:
    """Whether a forward takes anything and passes it on."""
    kinds = {item.kind for item in signature_of(forward)}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
