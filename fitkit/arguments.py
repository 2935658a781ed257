"""Arguments that users pass: checked with one clear error each, before any work, and named."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Literal, TypeVar, cast, overload

import numpy as np
import torch
from torch import nn

from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.foreign_names import instead
from fitkit.registry import nearest
from fitkit.typing import AnyCallable

Function = TypeVar("Function", bound=AnyCallable)
Value = TypeVar("Value")


def describe(value: object) -> str:
    """Return a short description of a value for a message: its repr, or type and shape.

    It takes little time and memory, whatever the value: the values of a file may be nested lists
    whose whole text no memory holds.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _LONGEST:
            return f"{type(value).__name__} {text[:60]}…"
    return text


_LONGEST = 80
"""Characters of a description."""

_BRACKETS: dict[object, tuple[str, str]] = {
    list.__repr__: ("[", "]"),
    tuple.__repr__: ("(", ")"),
    set.__repr__: ("{", "}"),
    frozenset.__repr__: ("frozenset({", "})"),
    dict.__repr__: ("{", "}"),
}
"""What stands around the items that a class's own repr shows."""


def _pieces(value: object) -> Iterator[str]:
    """Yield the parts of a value's repr as they are asked for; none is long, and none is empty."""
    kind = type(value)
    made_by: object = kind.__repr__
    if isinstance(value, (str, bytes)) and made_by in (str.__repr__, bytes.__repr__):
        yield repr(value[: _LONGEST + 1])
    elif isinstance(value, int) and value.bit_length() > 14_000:
        yield f"a {kind.__name__} too long to show"  # Python itself refuses to
    elif isinstance(value, Collection) and made_by in _BRACKETS:
        yield from _items(value, *_BRACKETS[made_by])
    elif isinstance(value, Mapping) and kind.__module__ == "collections":
        yield from _items(value, f"{kind.__name__}({{", "})")
    elif fields := _fields_of(value):
        yield f"{kind.__name__}("
        for number, (name, part) in enumerate(fields):
            yield f"{', ' if number else ''}{name}="
            yield from _pieces(part)
        yield ")"
    elif isinstance(shape := getattr(value, "shape", None), tuple) and not isinstance(
        value, np.generic
    ):
        yield f"{kind.__name__} of shape {tuple(shape)}"
    else:
        try:
            yield repr(value) or kind.__name__
        except Exception:  # the user's own code
            yield f"a {kind.__name__} that has no repr"


def _items(value: Collection[object], begin: str, end: str) -> Iterator[str]:
    if isinstance(value, (set, frozenset)) and not value:
        begin, end = f"{type(value).__name__}(", ")"
    yield begin
    for number, item in enumerate(value):
        if number:
            yield ", "
        yield from _pieces(item)
        if isinstance(value, Mapping):
            yield ": "
            yield from _pieces(value[item])
    yield f",{end}" if isinstance(value, tuple) and len(value) == 1 else end


def _fields_of(value: object) -> Sequence[tuple[str, object]]:
    """Return the names and values that a repr made by Python shows: `Point(x=1, y=2)`."""
    kind = type(value)
    if isinstance(value, (SimpleNamespace, Namespace)):
        return list(vars(value).items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return list(zip(kind._fields, value, strict=False))
    if dataclasses.is_dataclass(kind) and hasattr(kind.__repr__, "__wrapped__"):
        shown = [one.name for one in dataclasses.fields(kind) if one.repr]
        return [(name, getattr(value, name, None)) for name in shown]
    return ()


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def only_known_arguments(
    function: Function, elsewhere: Callable[[str], str] = lambda name: ""
) -> Function:
    """Make a call with an unknown keyword fail with the nearest name (`Did you mean …?`).

    A constructor's error has the name of its class.

    Args:
        function: the call.
        elsewhere: returns what to write for an argument that another call takes, or "".
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    accepted = [name for name in parameters if name != "self"]
    by_place = [
        item.name for item in parameters.values() if item.kind is item.POSITIONAL_OR_KEYWORD
    ]
    by_name = [item.name for item in parameters.values() if item.kind is item.KEYWORD_ONLY]
    required = sum(item.default is item.empty for item in parameters.values())
    most = len(by_place)

    def called(args: tuple[object, ...]) -> str:
        return type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        for name in kwargs:
            if name not in parameters:
                raise _unknown_argument(called(args), name, accepted, elsewhere(name))
        # Binding takes longer than these, which see that nothing is missing, nor given twice.
        count = len(args)
        if not required <= count <= most or (
            kwargs and not kwargs.keys().isdisjoint(by_place[:count])
        ):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                named = ", ".join(name for name in by_place if name != "self")
                rest = f"; write all else by name, like {by_name[0]}=…" if by_name else ""
                raise ArgumentTypeError(
                    f"{called(args)}() {error}. By position it takes {named}{rest}."
                ) from None
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _unknown_argument(
    call: str, name: str, accepted: list[str], elsewhere: str
) -> ArgumentTypeError:
    missing = f"{call}() has no argument {name!r}."
    if theirs := instead(call, name):  # it says more than all names that there are
        return ArgumentTypeError(f"{missing} {theirs}", code="FK093")
    if elsewhere:
        return ArgumentTypeError(f"{missing} {elsewhere}", code="FK029")
    if name.partition("__")[0] in accepted:  # scikit-learn's way to name a parameter's own
        return ArgumentTypeError(f"{missing} Write set_params({name}=…) after it.", code="FK029")
    close = nearest(name, accepted)
    suggestion = f" Did you mean {' or '.join(close)}?" if close else ""
    return ArgumentTypeError(
        f"{call}() has no argument {name!r}.{suggestion} It takes: {', '.join(accepted)}.",
        code="FK029",
    )


def plain(value: Value) -> Value:
    """Return a number, flag or string of NumPy's, or a tensor of one number, as Python's own."""
    if isinstance(value, np.generic) or (
        isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 0
    ):
        return cast(Value, value.item())
    return value


def keep_checked(record: object, check: AnyCallable, *names: str, **options: object) -> None:
    """Check attributes of a frozen record, and keep them as the check returns them.

    Args:
        check: `check_count` or another one.
        options: its options.
    """
    for name in names:
        vars(record)[name] = check(name, getattr(record, name), **options)


@overload
def check_count(name: str, value: object, *, minimum: int = 1) -> int: ...


@overload
def check_count(
    name: str, value: object, *, minimum: int = 1, optional: Literal[True]
) -> int | None: ...


def check_count(
    name: str, value: object, *, minimum: int = 1, optional: bool = False
) -> int | None:
    """Return a whole number of at least `minimum` as an int (None too, where `optional`).

    Raises:
        ArgumentTypeError, ConfigurationError: it is something else. A flag is no number.
    """
    number = plain(value)
    if number is None and optional:
        return None
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise ArgumentTypeError(
            f"{name}={describe(value)} must be an int of at least {minimum}"
            f"{' or None' if optional else ''}, not a {type(value).__name__}."
        )
    if number < minimum:
        raise ConfigurationError(f"{name}={number} must be at least {minimum}.")
    return int(number)


def check_epochs(
    name: str, value: Mapping[int, Value] | None, *, what: str, example: str
) -> dict[int, Value]:
    """Return a dict from epochs to something, in their order; refuse anything else.

    Args:
        name: the argument.
        what: the things, for the message: "sizes".
        example: a dict that is right.
    """
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"{name}={describe(value)} must be a dict of epochs and {what}, like {example}."
        )
    if not value:
        raise ConfigurationError(f"{name}={{}} has no epoch; write it like {example}.")
    counted = {check_count(f"{name}'s epoch", key, minimum=0): at for key, at in value.items()}
    return dict(sorted(counted.items()))


@overload
def check_number(
    name: str,
    value: object,
    *,
    above: float = ...,
    minimum: float = ...,
    below: float = ...,
    maximum: float = ...,
) -> float: ...


@overload
def check_number(
    name: str,
    value: object,
    *,
    above: float = ...,
    minimum: float = ...,
    below: float = ...,
    maximum: float = ...,
    optional: Literal[True],
) -> float | None: ...


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    minimum: float = -math.inf,
    below: float = math.inf,
    maximum: float = math.inf,
    optional: bool = False,
) -> float | None:
    """Return a finite number within the bounds as a float or an int (None too, where `optional`).

    Raises:
        ArgumentTypeError, ConfigurationError: it is something else. A flag is no number.
    """
    given = plain(value)
    if given is None and optional:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ArgumentTypeError(
            f"{name}={describe(value)} must be a number, not a {type(value).__name__}."
        )
    number = int(given) if isinstance(given, numbers.Integral) else float(given)
    if not math.isfinite(number):
        raise ConfigurationError(f"{name}={number} must be a finite number.")
    if number <= above or number < minimum or number >= below or number > maximum:
        bounds = []
        if above != -math.inf:
            bounds.append(f"above {above:g}")
        if minimum != -math.inf:
            bounds.append(f"at least {minimum:g}")
        if below != math.inf:
            bounds.append(f"below {below:g}")
        if maximum != math.inf:
            bounds.append(f"at most {maximum:g}")
        raise ConfigurationError(f"{name}={number} must be {' and '.join(bounds)}.")
    return number


@overload
def check_flag(name: str, value: object) -> bool: ...


@overload
def check_flag(name: str, value: object, *, optional: Literal[True]) -> bool | None: ...


def check_flag(name: str, value: object, *, optional: bool = False) -> bool | None:
    """Return True or False (None too, where `optional`); refuse anything else.

    Raises:
        ArgumentTypeError: with what was given.
    """
    flag = plain(value)
    if isinstance(flag, bool) or (flag is None and optional):
        return flag
    raise ArgumentTypeError(
        f"{name}={describe(value)} must be True or False{' or None' if optional else ''}."
    )


def check_choice(name: str, value: Value, choices: tuple[object, ...]) -> Value:
    """Return the one of `choices` that a value is; refuse anything else.

    Raises:
        ArgumentTypeError, ConfigurationError: with what was given, and the choices.
    """
    value = plain(value)
    if any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in choices
    ):
        return value
    listing = ", ".join(repr(choice) for choice in choices)
    close = (
        nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else []
    )
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    same_type = any(type(value) is type(choice) for choice in choices)
    kind = ConfigurationError if same_type else ArgumentTypeError
    raise kind(f"{name}={describe(value)} must be one of {listing}.{suggestion}")


VERBOSE = "FITKIT_VERBOSE"
"""The variable of the environment that `verbose="auto"` gives way to."""


def chosen_verbose(verbose: int | str) -> int | str:
    """`verbose` as it counts: `"auto"` gives way to the environment's FITKIT_VERBOSE.

    Raises:
        ConfigurationError: neither 0, 1, 2 nor `"auto"`.
    """
    verbose = plain(verbose)
    if isinstance(verbose, bool):
        verbose = int(verbose)
    check_choice("verbose", verbose, (0, 1, 2, "auto"))
    asked = os.environ.get(VERBOSE, "").strip().lower()
    if verbose != "auto" or asked in ("", "auto"):
        return verbose
    if asked not in ("0", "1", "2"):
        raise ConfigurationError(
            f"The environment has {VERBOSE}={asked!r}, which must be 0, 1, 2 or auto."
        )
    return int(asked)


TARGET_NAMES = frozenset({"y_true", "y", "true", "truth", "target", "targets", "label", "labels"})
PREDICTION_NAMES = frozenset({
    "y_pred", "y_hat", "yhat", "y_score", "prediction", "predictions", "pred", "preds", "output",
    "outputs", "input", "inputs", "logits",
})  # fmt: skip


def check_takes_pair(
    function: AnyCallable, label: str, kind: str, *, target_first: bool = False
) -> None:
    """Refuse a callable that can't take, or seems to swap, a prediction and its target.

    Args:
        function: a function, a module or any other callable; its own signature tells.
        label: how the message calls it.
        kind: what it was given as: `"loss"`, `"metric"`.
        target_first: whether it is called in Keras's order, `(y_true, y_pred)`. Default:
            `(prediction, target)`.

    Raises:
        ConfigurationError: it takes other arguments, or names them in the other order.
    """
    order = "(y_true, y_pred)" if target_first else "(prediction, target)"
    try:
        signature = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        )
    except (TypeError, ValueError):  # some callables written in C have none to show
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"{label} takes {signature}, but a {kind} is called with {order}: "
            f"{error}. Wrap it in a function of these two."
        ) from None
    first, second = [*signature.parameters, "", ""][:2]
    if target_first and first in PREDICTION_NAMES and second in TARGET_NAMES:
        raise ConfigurationError(
            f"{label} takes ({first}, {second}): the prediction first, as torch does. A {kind} of "
            f"a Keras network is called as Keras does, with {order}: swap the parameters.",
            code="FK016",
        )
    if not target_first and first in TARGET_NAMES and second in PREDICTION_NAMES:
        raise ConfigurationError(
            f"{label} takes ({first}, {second}): the target first, as Keras and scikit-learn do. "
            f"fitkit calls a {kind} as torch does, with (prediction, target): swap the "
            "parameters, or wrap it in a lambda that does.",
            code="FK016",
        )


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers, and no hook of its own acts in its call."""
    return (
        type(module).__module__.startswith("torch.nn.")
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(class_name: str) -> str:
    """`BCEWithLogitsLoss` as `bce_with_logits_loss`, `MeanIoU` as `mean_iou`."""
    return _WORD_STARTS.sub("_", class_name.replace("IoU", "Iou")).lower()


def callable_name(function: AnyCallable) -> str:
    """Return a function's name, the name inside a partial, or an object's class in snake case."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return snake_case(type(function).__name__)
    return "lambda" if name == "<lambda>" else name


LONGEST = 200
"""Characters of a setting; places that keep them have limits."""


def plain_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Strings, numbers and flags by name.

    What is None has no entry; parts of dicts, and of lists of objects, have theirs: `loss.box`.
    Functions, classes and objects become their names.
    """
    found: dict[str, object] = {}
    for name, value in given.items():
        found.update(_plain(str(name), value))
    return found


def _plain(name: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    parts: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (list, dict)) for v in value):
        parts = enumerate(value)
    elif isinstance(value, (list, tuple)):
        first = islice(value, LONGEST)  # each has a character at least
        return {name: ", ".join(map(name_of, first))[:LONGEST]} if value else {}
    else:
        return {name: value if isinstance(value, (int, float)) else name_of(value)[:LONGEST]}
    return plain_settings({f"{name}.{key}": part for key, part in parts})


def name_of(value: object) -> str:
    """Return what a value is called: never its address, which differs from run to run."""
    if isinstance(value, (str, int, float)) or value is None:
        return str(value)
    if isinstance(value, functools.partial):
        given = [name_of(item) for item in value.args]
        given += [f"{name}={name_of(item)}" for name, item in value.keywords.items()]
        return f"{name_of(value.func)}({', '.join(given)})"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__
