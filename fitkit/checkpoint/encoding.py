"""A run's state as JSON with numbered arrays: what goes into a checkpoint's `state`.

None, booleans, whole numbers, floats, strings and lists are JSON's own. All else is an object with
one member, whose name says what it is (`{"tuple": [1, 2]}`); `decoding.py` turns it back. Nothing
is stored as an object of a class, so nothing in a file can name code.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from fitkit.arguments import describe
from fitkit.checkpoint.dtypes import dtype_name
from fitkit.checkpoint.numbering import Numbering
from fitkit.errors import ConfigurationError

#: How deep a state may be nested; what a file nests deeper is refused.
DEEPEST = 100
#: Larger integers are written in hexadecimal digits, which Python reads at any length.
LARGEST_DECIMAL = 1 << 63
#: What a defaultdict may make its values with.
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, bytes, list, tuple, dict, set)
}
#: Unlike those of strings, the hashes of tuples and large numbers can be made equal on purpose,
#: and a dict of very many equal hashes takes hours to build. So there may only be so many.
MOST_GUESSABLE_KEYS = 10_000


def encode_state(value: object, numbering: Numbering, place: str = "state") -> Any:
    """`value` as JSON; its tensors and arrays get numbers from `numbering`.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset,
            OrderedDict (read back as a dict), Counter, defaultdict and deque; tensors, NumPy
            arrays and scalars, torch's dtypes, devices and sizes; timedelta; nested at will.
        numbering: collects the arrays of the file.
        place: what `value` is called in messages.

    Raises:
        ConfigurationError: something in it is none of these; the message names its place.
    """
    return _Encoder(numbering).encode(value, place, 0)


class _Encoder:
    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering

    def encode(self, value: object, place: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise ConfigurationError(
                f"{place} is nested more than {DEEPEST} deep, or contains itself. "
                "Save something flatter."
            )
        if value is None or type(value) is str:
            return value
        kind = type(value)
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        if kind is list:
            return self._items(value, place, depth)
        if kind in (tuple, deque, set, frozenset):
            return {kind.__name__: self._sequence(value, place, depth)}
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._mapping(value, place, depth)
        return self._numbers(value, place)

    def _items(self, values: Any, place: str, depth: int) -> list[Any]:
        return [
            self.encode(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(values)
        ]

    def _sequence(self, value: Any, place: str, depth: int) -> Any:
        items = self._items(value, place, depth)
        if isinstance(value, deque):
            return [value.maxlen, items]
        if isinstance(value, (set, frozenset)):
            check_keys(value, place)
            items.sort(key=json.dumps)  # the order of strings in a set changes with each process
        return items

    def _mapping(self, mapping: Any, place: str, depth: int) -> Any:
        check_keys(mapping, place)
        if type(mapping) in (dict, OrderedDict) and all(type(key) is str for key in mapping):
            return {
                "dict": {
                    key: self.encode(item, f"{place}[{key!r}]", depth + 1)
                    for key, item in mapping.items()
                }
            }
        pairs = [
            [
                self._key(key, place, depth),
                self.encode(item, f"{place}[{key!r}]", depth + 1),
            ]
            for key, item in mapping.items()
        ]
        if isinstance(mapping, Counter):
            return {"Counter": pairs}
        if isinstance(mapping, defaultdict):
            return {"defaultdict": [_factory(mapping, place), pairs]}
        return {"items": pairs}

    def _key(self, key: object, place: str, depth: int) -> Any:
        if not is_key(key):
            raise ConfigurationError(
                f"{place} has the key {describe(key)}, and a file holds only None, booleans, "
                "numbers, strings, bytes and tuples of these as keys. Write it as one of these."
            )
        return self.encode(key, f"the key {key!r} of {place}", depth + 1)

    def _numbers(self, value: object, place: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._number(value, place)}
        if isinstance(value, np.ndarray) and is_numeric(value.dtype):
            return {"array": [value.dtype.str, self._number(value, place)]}
        if isinstance(value, np.generic) and is_numeric(value.dtype):
            little_endian = value.dtype.newbyteorder("<")
            return {"scalar": [little_endian.str, _text(value.astype(little_endian).tobytes())]}
        raise ConfigurationError(
            f"{place}={describe(value)} can't be written to a file: only pickle could store a "
            f"{type(value).__name__}, and pickles can run code when they are read. Use plain data "
            "(None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets) and tensors."
        )

    def _number(self, value: object, place: str) -> int:
        try:
            return self._numbering.add(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from None


def is_key(value: object) -> bool:
    """Whether a dict or set in a file may have it as a key or member."""
    if type(value) is tuple:
        return all(map(is_key, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether it is a type of plain numbers that every machine has."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def check_keys(keys: Iterable[object], place: str) -> None:
    """Refuse more keys of guessable hashes than a dict can be built of quickly."""
    guessable = sum(
        type(key) is tuple or (type(key) is int and abs(key) >= 1 << 60) for key in keys
    )
    if guessable > MOST_GUESSABLE_KEYS:
        raise ConfigurationError(
            f"{place} has {guessable} tuples or very large numbers as keys, and a file holds at "
            f"most {MOST_GUESSABLE_KEYS} in one dict or set. Use strings as keys."
        )


def _factory(mapping: defaultdict[Any, Any], place: str) -> str | None:
    factory: Any = mapping.default_factory
    if factory is None:
        return None
    name: str = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is not factory:
        raise ConfigurationError(
            f"{place} is a defaultdict that makes its values with {describe(factory)}, and a "
            f"file holds only {', '.join(FACTORIES)}. Save dict(…) of it."
        )
    return name


def _integer(value: int) -> Any:
    return value if abs(value) < LARGEST_DECIMAL else {"int": hex(value)}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


_LEAVES: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: value,
    float: lambda value: value,
    int: _integer,
    complex: lambda value: {"complex": [value.real, value.imag]},
    bytes: lambda value: {"bytes": _text(value)},
    torch.dtype: lambda value: {"dtype": dtype_name(value)},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"Size": list(value)},
    datetime.timedelta: lambda value: {
        "timedelta": [value.days, value.seconds, value.microseconds]
    },
}
