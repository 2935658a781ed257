"""Random number generators, seen and seeded fast: the process's, and those of a data set's own.

Whole states cost 6 to 60 µs in Python's and NumPy's generators. Whether one has moved is seen in
0.2 µs, by its place and two of its words.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import re
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

WORDS = 624
"""How many numbers the state of a Mersenne Twister has."""


class Numbers(Protocol):
    """A generator of random numbers."""

    def look(self) -> Any:
        """Return what is another thing once a number has been drawn since `seed`."""

    def save(self) -> Any:
        """Return the state."""

    def mark(self, saved: Any) -> Any:
        """Return the mark of a saved state: another one for another state."""

    def has_moved(self, saved: Any) -> bool:
        """Whether the state is another one than the saved one."""

    def restore(self, saved: Any) -> None:
        """Give back a saved state."""

    def seed(self, bits: int) -> None:
        """Begin anew, by 128 bits."""


class TorchNumbers:
    """torch's default generator on the CPU.

    `torch.manual_seed` would seed devices, too, and takes 80 to 300 µs.
    """

    def look(self) -> Any:
        """Return the place, two words, and the normal numbers in store."""
        return self.mark(self.save())

    def save(self) -> Any:
        """Return the state."""
        return torch.default_generator.get_state()

    def mark(self, saved: Any) -> Any:
        """Return the mark of a saved state."""
        state = saved.numpy()
        return state[:40].tobytes(), state[5016:].tobytes()

    def has_moved(self, saved: Any) -> bool:
        """Whether the state is another one."""
        now = torch.default_generator.get_state()
        # torch.equal takes twice as long.
        return bool(now.numpy().tobytes() != saved.numpy().tobytes())

    def restore(self, saved: Any) -> None:
        """Give back a saved state."""
        torch.default_generator.set_state(saved)

    def seed(self, bits: int) -> None:
        """Begin anew. torch uses 32 bits of them."""
        torch.default_generator.manual_seed(bits & 0xFFFFFFFF)


class _Peeked:
    """A Mersenne Twister that is seen in memory.

    After 624 draws its place is the same again, and the words aren't.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._views: tuple[Any, Any] | None = None

    def _view(self, words: int, place: int) -> None:
        """Look at these addresses from now on."""
        self._views = ctypes.c_uint64.from_address(words), ctypes.c_int.from_address(place)

    def look(self) -> Any:
        if self._views is None:
            return self.whole()
        words, place = self._views
        return words.value, place.value

    def save(self) -> Any:
        """Return what was seen, and the whole state."""
        seen = self.look()
        if self._last is None or seen != self._last[0] or self.stored(self._last[1]) is not None:
            self._last = seen, self.whole()
        return self._last

    def mark(self, saved: Any) -> Any:
        return saved[0], self.stored(saved[1])

    def has_moved(self, saved: Any) -> bool:
        if self.stored(saved[1]) is None:
            return bool(self.look() != saved[0])
        return bool(self.mark(self.save()) != self.mark(saved))

    def restore(self, saved: Any) -> None:
        self.set_whole(saved[1])
        self._last = saved

    def stored(self, whole: Any) -> Any:
        """Return a number in store, which can be taken without a move that is seen; or None."""
        return None

    def whole(self) -> Any:
        raise NotImplementedError

    def set_whole(self, whole: Any) -> None:
        raise NotImplementedError


class PythonNumbers(_Peeked):
    """The generator of the module `random`."""

    def __init__(self) -> None:
        super().__init__()
        size = 4 + 4 * WORDS
        # In CPython the place, then the words. Where that isn't so, whole states are compared.
        at = id(random._inst) + object.__basicsize__
        if sys.implementation.name == "cpython" and (
            random.Random.__basicsize__ >= object.__basicsize__ + size
        ):
            place, *words = struct.unpack(f"=i{WORDS}I", ctypes.string_at(at, size))
            if (*words, place) == random.getstate()[1]:
                self._view(at + 4, at)

    def look(self) -> Any:
        return super().look(), random._inst.gauss_next  # type: ignore[attr-defined]

    def whole(self) -> Any:
        return random.getstate()

    def set_whole(self, whole: Any) -> None:
        random.setstate(whole)

    def seed(self, bits: int) -> None:
        # As random.seed, which asks first what it is given.
        _random.Random.seed(random._inst, bits >> 64)
        random._inst.gauss_next = None  # type: ignore[attr-defined]


class NumPyNumbers(_Peeked):
    """NumPy's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self._source: Any = None
        self._words: Any = None

    def look(self) -> Any:
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if source is not self._source:  # the first time, or after np.random.set_bit_generator
            self._source, self._views, self._last = source, None, None
            if type(source) is np.random.MT19937:
                at = source.ctypes.state_address  # the words, then the place
                self._view(at, at + 4 * WORDS)
                self._words = np.ctypeslib.as_array((ctypes.c_uint32 * WORDS).from_address(at))
        return super().look() if self._views is not None else repr(source.state)

    def stored(self, whole: Any) -> Any:
        return whole.get("gauss") if whole.get("has_gauss") else None

    def whole(self) -> Any:
        return np.random.get_state(legacy=False)

    def set_whole(self, whole: Any) -> None:
        self.look()
        if self._views is None or whole.get("bit_generator") != "MT19937" or whole["has_gauss"]:
            np.random.set_state(whole)
            return
        # The same in memory: NumPy takes 35 µs to copy the words one by one.
        np.random.seed(0)  # drops a normal number in store
        with self._source.lock:
            self._words[:] = whole["state"]["key"]
            self._views[1].value = whole["state"]["pos"]

    def seed(self, bits: int) -> None:
        # Of another bit generator, which the user has set, NumPy makes a new one: 8 µs.
        np.random.seed(bits >> 32 & 0xFFFFFFFF)


class AskedSeed:
    """The number of `sample_seed`, which counts as drawn where it is asked for."""

    def __init__(self) -> None:
        self._asked = 0
        self._number: int | None = None

    def begin(self) -> None:
        """Let it be asked for, although no sample has been seeded."""
        self._number = 0

    def end(self) -> None:
        """Let it be asked for outside of data."""
        self._number = None

    def number(self) -> int | None:
        """Return the sample's number; None outside of a data set that fitkit reads."""
        self._asked += 1
        return self._number

    def look(self) -> Any:
        return self._asked

    def save(self) -> Any:
        return self._asked

    def mark(self, saved: Any) -> Any:
        return saved

    def has_moved(self, saved: Any) -> bool:
        return bool(self._asked != saved)

    def restore(self, saved: Any) -> None:
        """Nobody draws from it."""

    def seed(self, bits: int) -> None:
        self._number = (bits >> 33) & 0x7FFFFFFF


asked_seed = AskedSeed()
"""Of this process."""

OF_THE_PROCESS: tuple[Numbers, ...] = (TorchNumbers(), NumPyNumbers(), PythonNumbers())
"""The generators that everybody draws from."""


class OwnNumbers:
    """A generator that a data set keeps itself.

    Args:
        one: the generator.
        name: what tells it from others of the data set. Two with one name draw the same numbers.
    """

    def __init__(self, one: Any, name: str) -> None:
        self.one = one
        self._apart: int = xxhash.xxh3_128_intdigest(name.encode())

    def look(self) -> Any:
        return self.mark(self.save())

    def save(self) -> Any:
        return state_of(self.one)

    def mark(self, saved: Any) -> Any:
        return mark_of(saved)

    def has_moved(self, saved: Any) -> bool:
        return bool(self.look() != mark_of(saved))

    def restore(self, saved: Any) -> None:
        one = self.one
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = saved
        elif isinstance(one, random.Random):
            one.setstate(saved)
        else:
            one.set_state(saved)

    def seed(self, bits: int) -> None:
        one, bits = self.one, bits ^ self._apart
        if isinstance(one, np.random.Generator):
            source = one.bit_generator
            if type(source) is np.random.PCG64:
                begun: Any = {**_PCG64, "state": {**_PCG64["state"], "state": bits}}
                source.state = begun
            else:
                source.state = type(source)(bits).state
        elif isinstance(one, np.random.RandomState):
            one.seed(bits & 0xFFFFFFFF)
        elif isinstance(one, torch.Generator):
            one.manual_seed(bits & 0xFFFFFFFF)
        else:
            one.seed(bits)


_PCG64: dict[str, Any] = {
    "bit_generator": "PCG64",
    "state": {"state": 0, "inc": 0x5851F42D4C957F2D14057B7EF767814F},
    "has_uint32": 0,
    "uinteger": 0,
}
"""A state of PCG64: one stream of numbers, begun at the bits. A new generator takes 7 µs."""


def state_of(one: Any) -> Any:
    """Return the state of a generator of any kind."""
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    if isinstance(one, np.random.RandomState):
        return one.get_state(legacy=False)
    return one.get_state() if isinstance(one, torch.Generator) else one.getstate()


def mark_of(saved: Any) -> Any:
    """Return what is equal for equal states."""
    if isinstance(saved, torch.Tensor):
        return saved.cpu().numpy().tobytes()
    if isinstance(saved, Mapping):
        return tuple(mark_of(value) for value in saved.values())
    return saved.tobytes() if isinstance(saved, np.ndarray) else saved


KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

MOST_OBJECTS = 20_000
"""How many objects of a data set are looked at."""

MOST_ENTRIES, FIRST = 1000, 8
"""Of a container with more entries, only the first ones are looked at: it is the data."""

_LEAVES = (
    *(int, float, str, bytes, bytearray, bool, complex, type(None), type),
    *(np.ndarray, torch.Tensor, types.FunctionType, types.ModuleType),
)
"""What has no generators inside. What a function's closure has isn't looked at."""


def generators_in(data: Any) -> dict[str, Any]:
    """Return the generators that attributes, lists, tuples and dicts lead to, by their paths.

    Each comes once, by its first path. Breadth comes first, so that what is near isn't cut off.
    """
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # the objects themselves, so that no id is used again
    level = [("", data)]
    while level and len(seen) < MOST_OBJECTS:
        following: list[tuple[str, Any]] = []
        for path, thing in level:
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing
            if isinstance(thing, KINDS):
                if not _is_left_alone(thing):
                    found[path] = thing
                continue
            following += (
                (f"{path}{name}", one) for name, one in _inside(thing) if not _is_leaf(one)
            )
        level = following
    return found


def _step(one: Any) -> str:
    """Return what a path says of an entry of a list: its class, if it is a step of a pipeline."""
    return f" {type(one).__name__}" if callable(one) else ""


_LAST_STEP = re.compile(r"(.*)\[\d+ (\w+)\]")
"""The list and the class of the last step in a path."""


def names_of_alike(paths: list[str]) -> dict[str, str]:
    """Return the names of generators with one state, by their paths; those with one name are alike.

    They all are, such as those of an image and of its mask. But the transforms of a pipeline, which
    may have got its seed, aren't: if one list has steps of several classes, classes are apart.
    """
    found = {path: _LAST_STEP.match(path) for path in paths}
    steps = {path: step.groups() if step else ("", "") for path, step in found.items()}
    is_pipeline = len(set(steps.values())) > len({place for place, _ in steps.values()})
    first: dict[str, str] = {}
    return {
        path: first.setdefault(kind if is_pipeline else "", path)
        for path, (_, kind) in steps.items()
    }


def _is_leaf(one: Any) -> bool:
    return isinstance(one, _LEAVES) and not isinstance(one, KINDS)


def _is_left_alone(one: Any) -> bool:
    """Whether a generator is the process's, or a device's, which a worker can't ask."""
    ours = random._inst, torch.default_generator, np.random.mtrand._rand
    is_ours = any(one is each for each in ours)
    return is_ours or (isinstance(one, torch.Generator) and one.device.type != "cpu")


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, (list, tuple)):
        entries = thing if len(thing) <= MOST_ENTRIES else thing[:FIRST]
        yield from ((f"[{place}{_step(one)}]", one) for place, one in enumerate(entries))
    elif isinstance(thing, dict):
        if len(thing) <= MOST_ENTRIES:
            yield from ((f"[{place}]", one) for place, one in enumerate(list(thing.values())))
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, (types.MethodType, types.BuiltinMethodType)):
        yield ".self", thing.__self__
    for name, one in list(getattr(thing, "__dict__", {}).items()):
        yield f".{name}", one
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(thing, kind)
                except AttributeError:  # it has no value yet
                    continue
