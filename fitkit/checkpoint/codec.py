"""A tree of Python values and arrays as JSON that refers to arrays by number, and back."""

from __future__ import annotations

import base64
import datetime
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from fitkit.arguments import describe
from fitkit.checkpoint.arrays import Numbering, dtype_name
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
            **{name: _leaf(make) for name, make in _READ_LEAVES.items()},
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


def _read_integer(part: Any) -> int:
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


_READ_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": _read_integer,
    "complex": _complex,
    "bytes": _bytes,
    "dtype": _dtype,
    "device": _device,
    "Size": _size,
    "timedelta": _timedelta,
    "scalar": _scalar,
}
