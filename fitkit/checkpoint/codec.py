"""A tree of Python values and arrays as JSON that refers to arrays by number, and back."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fitkit.arguments import describe, dtype_name
from fitkit.checkpoint.arrays import Numbering, dtype_named
from fitkit.errors import ConfigurationError

#: How deep a state may be nested; what a file nests deeper is refused.
DEEPEST = 100
#: Larger integers are written in hexadecimal digits, which Python reads at any length.
LARGEST_DECIMAL = 1 << 63

_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")


def encode_state(value: Any, numbering: Numbering, place: str = "state", depth: int = 0) -> Any:
    """`value` as JSON; its tensors and arrays get numbers from `numbering`.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, OrderedDict (read back
            as a dict), Counter, torch.Size, torch.dtype; tensors, NumPy arrays and
            scalars; nested at will.
        numbering: collects the arrays of the file.
        place: what `value` is called in messages.
        depth: how deep it lies in what is encoded.

    Raises:
        ConfigurationError: something in it is none of these; the message names its place.
    """
    if depth > DEEPEST:
        raise ConfigurationError(
            f"{place} is nested more than {DEEPEST} deep, or contains itself. "
            "Save something flatter."
        )

    def within(item: object, where: str) -> Any:
        return encode_state(item, numbering, where, depth + 1)

    kind = type(value)
    if value is None or kind in (str, bool, float):
        return value
    if kind is int:
        return value if abs(value) < LARGEST_DECIMAL else {"int": hex(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is torch.Size:
        return {"size": list(value)}
    if isinstance(value, torch.dtype) and dtype_named(dtype_name(value)) is value:
        return {"dtype": dtype_name(value)}
    if kind in (list, tuple, set):
        items = [within(item, f"{place}[{index}]") for index, item in enumerate(value)]
        if kind is list:
            return items
        if kind is set:
            items.sort(key=json.dumps)  # the order of strings in a set changes with each process
        return {kind.__name__: items}
    if isinstance(value, dict) and kind in (dict, OrderedDict, Counter):
        if kind is not Counter and all(type(key) is str for key in value):
            return {"dict": {key: within(item, f"{place}[{key!r}]") for key, item in value.items()}}
        pairs = []
        for key, item in value.items():
            if not is_key(key):
                raise ConfigurationError(
                    f"{place} has the key {describe(key)}, and a file holds only None, booleans, "
                    "numbers, strings, bytes and tuples of these as keys. Write it as one of these."
                )
            name = within(key, f"the key {key!r} of {place}")
            pairs.append([name, within(item, f"{place}[{key!r}]")])
        return {"Counter" if kind is Counter else "items": pairs}
    try:
        if isinstance(value, torch.Tensor):
            return {"tensor": numbering.add(value)}
        if isinstance(value, np.ndarray) and is_numeric(value.dtype):
            return {"array": numbering.add(value)}
        if isinstance(value, np.generic) and is_numeric(value.dtype):
            return {"scalar": numbering.add(np.asarray(value))}
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None
    raise ConfigurationError(
        f"{place}={describe(value)} can't be written to a file: only pickle could store a "
        f"{kind.__name__}, and pickles can run code when they are read. Use plain data "
        "(None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, sizes, dtypes) and "
        "tensors.",
        code="FK057",
    )


def check_plain(value: object, place: str) -> None:
    """Refuse what `encode_state` can't write.

    Raises:
        ConfigurationError: the message names its place.
    """
    encode_state(value, Numbering(), place)


def is_key(value: object) -> bool:
    """Whether a dict or set in a file may have it as a key or member."""
    if type(value) is tuple:
        return all(map(is_key, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether it is a type of plain numbers that every machine has."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def decode_state(encoded: object, read: Callable[[int], torch.Tensor]) -> Any:
    """Return what `encode_state` was given.

    Args:
        encoded: the JSON.
        read: gives the array of a number as a tensor of its own on the CPU; raises ValueError
            where there is none.

    Raises:
        ValueError: the JSON isn't as `encode_state` writes it.
    """
    return _Decoder(read).decode(encoded, 0)


class _Decoder:
    def __init__(self, read: Callable[[int], torch.Tensor]) -> None:
        self._read = read
        self._tensors: dict[int, torch.Tensor] = {}

    def decode(self, encoded: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"its state is nested more than {DEEPEST} deep")
        if isinstance(encoded, list):
            return [self.decode(item, depth + 1) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        if len(encoded) != 1:
            raise ValueError("a part of its state has no kind")
        ((kind, part),) = encoded.items()
        if type(part) is not _WRITTEN_AS.get(kind):
            raise ValueError(f"its state has a {kind[:40]!r} that is unknown here or malformed")
        match kind:
            case "int":
                if not _HEXADECIMAL.fullmatch(part):
                    raise ValueError("its state has an int that isn't in hexadecimal digits")
                return int(part, 16)
            case "bytes":
                return base64.b64decode(part, validate=True)
            case "tuple":
                return tuple(self.decode(part, depth))
            case "set":
                return set(self._keys(part, depth))
            case "size":
                if not all(type(n) is int and 0 <= n < LARGEST_DECIMAL for n in part):
                    raise ValueError("its state has a size that isn't of numbers from 0")
                return torch.Size(part)
            case "dtype":
                dtype = dtype_named(part)
                if dtype is None:
                    raise ValueError(
                        f"its state has the dtype {part[:40]!r}, which is unknown here"
                    )
                return dtype
            case "dict":
                return {key: self.decode(item, depth + 1) for key, item in part.items()}
            case "items" | "Counter":
                if not all(isinstance(pair, list) and len(pair) == 2 for pair in part):
                    raise ValueError("a dict in its state isn't of pairs")
                values = [self.decode(item, depth + 1) for _, item in part]
                found = dict(zip(self._keys([key for key, _ in part], depth), values, strict=True))
                return Counter(found) if kind == "Counter" else found
        tensor = self._tensor(part)
        if kind == "tensor":
            return tensor
        try:
            array = tensor.numpy()
        except TypeError:
            raise ValueError(f"its state has an array of {tensor.dtype}") from None
        if kind == "array":
            return array
        if array.shape:
            raise ValueError("its state has a scalar of several numbers")
        return array[()]

    def _keys(self, part: list[Any], depth: int) -> list[Any]:
        keys = [self.decode(item, depth + 1) for item in part]
        if not all(map(is_key, keys)):
            raise ValueError("a dict or set in its state has an impossible key")
        if len(set(keys)) != len(keys):
            raise ValueError("a dict or set in its state has a key twice")
        return keys

    def _tensor(self, number: int) -> torch.Tensor:
        if number not in self._tensors:
            self._tensors[number] = self._read(number)
        return self._tensors[number]


#: What the value of each kind is in JSON.
_WRITTEN_AS: dict[str, Any] = {
    **dict.fromkeys(("int", "bytes", "dtype"), str),
    **dict.fromkeys(("tuple", "set", "size", "items", "Counter"), list),
    "dict": dict,
    **dict.fromkeys(("tensor", "array", "scalar"), int),
}
