"""A run's state out of JSON and numbered arrays: the reverse of `encoding.py`.

A file may say anything here, so every part is checked before it is built. Only the kinds below are
ever made; a name in a file is compared with theirs and used for nothing else.
"""

from __future__ import annotations

import base64
import datetime
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fitkit.checkpoint.encoding import (
    DEEPEST,
    FACTORIES,
    LARGEST_DECIMAL,
    check_keys,
    is_key,
    is_numeric,
)

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,5})?")
_NUMPY_TYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")


def decode_state(encoded: object, read: Callable[[int], torch.Tensor]) -> Any:
    """What `encode_state` was given.

    Args:
        encoded: the JSON.
        read: gives the array of a number as a tensor of its own on the CPU; raises IndexError
            where there is none.

    Raises:
        ValueError: the JSON isn't as `encode_state` writes it.
    """
    return _Decoder(read).decode(encoded, 0)


class _Decoder:
    def __init__(self, read: Callable[[int], torch.Tensor]) -> None:
        self._read = read
        self._tensors: dict[int, torch.Tensor] = {}
        self._arrays: dict[tuple[int, np.dtype[Any]], np.ndarray[Any, Any]] = {}
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            **{name: _leaf(make) for name, make in _LEAVES.items()},
            "tuple": lambda part, depth: tuple(self._items(part, depth)),
            "deque": self._deque,
            "set": lambda part, depth: self._members(set, part, depth),
            "frozenset": lambda part, depth: self._members(frozenset, part, depth),
            "dict": self._dict,
            "items": lambda part, depth: dict(self._pairs(part, depth)),
            "Counter": self._counter,
            "defaultdict": self._defaultdict,
            "tensor": lambda part, depth: self._tensor(part),
            "array": lambda part, depth: self._array(part),
        }

    def decode(self, encoded: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"its state is nested more than {DEEPEST} deep")
        if isinstance(encoded, list):
            return self._items(encoded, depth)
        if not isinstance(encoded, dict):
            return encoded
        if len(encoded) != 1:
            raise ValueError("a part of its state has no kind")
        ((kind, part),) = encoded.items()
        if kind not in self._kinds:
            raise ValueError(f"its state has a part of the kind {kind[:40]!r}, unknown here")
        try:
            return self._kinds[kind](part, depth)
        except (TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"its state has a malformed {kind} ({error})") from None

    def _items(self, part: Any, depth: int) -> list[Any]:
        return [self.decode(item, depth + 1) for item in _list(part)]

    def _deque(self, part: Any, depth: int) -> deque[Any]:
        longest, items = _list(part)
        if longest is not None and (type(longest) is not int or longest < len(_list(items))):
            raise ValueError("a deque in its state is longer than it may be")
        return deque(self._items(items, depth), longest)

    def _members(self, kind: Callable[[list[Any]], Any], part: Any, depth: int) -> Any:
        members = self._items(part, depth)
        _check_keys(members)
        made = kind(members)
        if len(made) != len(members):
            raise ValueError("a set in its state has a member twice")
        return made

    def _dict(self, part: Any, depth: int) -> dict[str, Any]:
        if not isinstance(part, dict):
            raise TypeError("not an object")
        return {key: self.decode(item, depth + 1) for key, item in part.items()}

    def _pairs(self, part: Any, depth: int) -> list[tuple[Any, Any]]:
        pairs = []
        for pair in _list(part):
            key, item = _list(pair)
            pairs.append((self.decode(key, depth + 1), self.decode(item, depth + 1)))
        keys = [key for key, _ in pairs]
        _check_keys(keys)
        if len(set(keys)) != len(keys):
            raise ValueError("a dict in its state has a key twice")
        return pairs

    def _counter(self, part: Any, depth: int) -> Counter[Any]:
        return Counter(dict(self._pairs(part, depth)))

    def _defaultdict(self, part: Any, depth: int) -> defaultdict[Any, Any]:
        name, pairs = _list(part)
        if name is not None and name not in FACTORIES:
            raise ValueError("a defaultdict in its state has an unknown factory")
        return defaultdict(FACTORIES.get(name), self._pairs(pairs, depth))

    def _tensor(self, number: Any) -> torch.Tensor:
        if type(number) is not int or number < 0:
            raise ValueError("its state names an array by what isn't a number")
        if number not in self._tensors:
            self._tensors[number] = self._read(number)
        return self._tensors[number]

    def _array(self, part: Any) -> np.ndarray[Any, Any]:
        name, number = _list(part)
        dtype = _numpy_dtype(name)
        tensor = self._tensor(number)
        if tensor.dtype == torch.bfloat16 or tensor.dtype.itemsize != dtype.itemsize:
            raise ValueError(f"its state has an array of {name} that is stored as {tensor.dtype}")
        array = tensor.numpy()
        if array.dtype != dtype.newbyteorder("="):
            raise ValueError(f"its state has an array of {name} that is stored as {array.dtype}")
        # Only an array of foreign byte order is copied, so that shared memory stays shared; and
        # once, however often the file names it.
        if (number, dtype) not in self._arrays:
            self._arrays[number, dtype] = array.astype(dtype, copy=False)
        return self._arrays[number, dtype]


def _leaf(make: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    return lambda part, depth: make(part)


def _list(part: Any) -> list[Any]:
    if not isinstance(part, list):
        raise TypeError("not a list")
    return part


def _check_keys(keys: list[Any]) -> None:
    if not all(map(is_key, keys)):
        raise ValueError("a dict or set in its state has an impossible key")
    check_keys(keys, "a part of its state")


def _integer(part: Any) -> int:
    if not isinstance(part, str) or not _HEXADECIMAL.fullmatch(part):
        raise TypeError("not in hexadecimal digits")
    return int(part, 16)


def _complex(part: Any) -> complex:
    real, imaginary = _list(part)
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("not two floats")
    return complex(real, imaginary)


def _bytes(part: Any) -> bytes:
    if not isinstance(part, str):
        raise TypeError("not text")
    return base64.b64decode(part, validate=True)


def _dtype(part: Any) -> torch.dtype:
    if part not in _DTYPES:
        raise ValueError(f"its state has the dtype {str(part)[:40]!r}, unknown to this torch")
    return _DTYPES[part]


def _device(part: Any) -> torch.device:
    try:
        if isinstance(part, str) and _DEVICE.fullmatch(part):
            device = torch.device(part)
            if str(device) == part:  # torch takes a large index for a smaller one
                return device
    except RuntimeError:
        pass  # a kind of device that this torch doesn't know
    raise ValueError(f"its state has the device {str(part)[:40]!r}, unknown to this torch")


def _size(part: Any) -> torch.Size:
    return torch.Size(_whole_numbers(part))


def _whole_numbers(part: Any) -> list[int]:
    # Larger ones fail wherever torch looks at them, were it to show them in a message.
    if not all(type(size) is int and abs(size) < LARGEST_DECIMAL for size in _list(part)):
        raise TypeError("not whole numbers")
    return _list(part)


def _timedelta(part: Any) -> datetime.timedelta:
    days, seconds, microseconds = _whole_numbers(part)
    return datetime.timedelta(days, seconds, microseconds)


def _scalar(part: Any) -> np.generic:
    name, text = _list(part)
    (scalar,) = np.frombuffer(_bytes(text), _numpy_dtype(name))
    if scalar.dtype.kind == "b" and _bytes(text) not in (b"\0", b"\1"):
        raise ValueError("not a boolean")
    return scalar.astype(scalar.dtype.newbyteorder("="))


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if isinstance(name, str) and _NUMPY_TYPE.fullmatch(name):
        dtype = np.dtype(name)
        if is_numeric(dtype):
            return dtype
    raise ValueError(f"its state has the NumPy type {str(name)[:40]!r}, unknown here")


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "complex": _complex,
    "bytes": _bytes,
    "dtype": _dtype,
    "device": _device,
    "Size": _size,
    "timedelta": _timedelta,
    "scalar": _scalar,
}
