"""Checks of the arguments that users pass: one clear error each, before any work."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.registry import nearest

Function = TypeVar("Function", bound=Callable[..., Any])


def describe(value: object) -> str:
    """A short description of a value for a message: its repr, or type and shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    try:
        text = repr(value)
    except ValueError:  # Python shows no whole numbers of more than 4,300 digits
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}…"


def only_known_arguments(function: Function) -> Function:
    """Make a call with an unknown keyword fail with the nearest name (`Did you mean …?`)."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    accepted = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in parameters:
                raise _unknown_argument(function.__name__, name, accepted)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _unbound(function.__name__, signature, error) from None
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _unbound(call: str, signature: inspect.Signature, error: TypeError) -> ArgumentTypeError:
    """The error for arguments that are missing, or too many by position."""
    by_place = [
        item.name
        for item in signature.parameters.values()
        if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and item.name != "self"
    ]
    return ArgumentTypeError(
        f"{call}() {error}. By position it takes {', '.join(by_place)}; write all else by name, "
        "like batch_size=32."
    )


def _unknown_argument(call: str, name: str, accepted: list[str]) -> ArgumentTypeError:
    close = nearest(name, accepted)
    suggestion = f" Did you mean {' or '.join(close)}?" if close else ""
    return ArgumentTypeError(
        f"{call}() has no argument {name!r}.{suggestion} It takes: {', '.join(accepted)}."
    )


def check_count(name: str, value: object, *, minimum: int = 1, optional: bool = False) -> None:
    """Refuse what isn't a whole number of at least `minimum` (None too, where `optional`)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(
            f"{name}={describe(value)} must be an int of at least {minimum}"
            f"{' or None' if optional else ''}, not a {type(value).__name__}."
        )
    if value < minimum:
        raise ConfigurationError(f"{name}={value} must be at least {minimum}.")


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    minimum: float = -math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> None:
    """Refuse what isn't a finite number within the bounds (None passes where `optional`)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            f"{name}={describe(value)} must be a number, not a {type(value).__name__}."
        )
    number = float(value)
    if not math.isfinite(number):
        raise ConfigurationError(f"{name}={value} must be a finite number.")
    if number <= above or number < minimum or number >= below:
        bounds = []
        if above != -math.inf:
            bounds.append(f"above {above:g}")
        if minimum != -math.inf:
            bounds.append(f"at least {minimum:g}")
        if below != math.inf:
            bounds.append(f"below {below:g}")
        raise ConfigurationError(f"{name}={value} must be {' and '.join(bounds)}.")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse what isn't True or False (None passes where `optional`)."""
    if isinstance(value, bool) or (value is None and optional):
        return
    raise ArgumentTypeError(
        f"{name}={describe(value)} must be True or False{' or None' if optional else ''}."
    )


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse what isn't one of `choices`."""
    if any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in choices
    ):
        return
    listing = ", ".join(repr(choice) for choice in choices)
    close = (
        nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else []
    )
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    same_type = any(type(value) is type(choice) for choice in choices)
    kind = ConfigurationError if same_type else ArgumentTypeError
    raise kind(f"{name}={describe(value)} must be one of {listing}.{suggestion}")
