"""Names that a wrapper has put something in front of, as in files that other programs write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fitkit.errors import warn

if TYPE_CHECKING:
    from fitkit.checkpoint.formats import WeightSource

# DataParallel and DDP; torch.compile; what models that hold a net mostly call it.
_PREFIXES = ("module.", "_orig_mod.", "net.", "model.")


def without_wrapper(source: WeightSource, expected: Mapping[str, Any], path: str) -> WeightSource:
    """`source`, without a wrapper's prefix where all names have one and fit without it.

    Says so with a warning. Where the names fit as they are, or don't fit either way, `source`
    itself is returned.
    """
    names = [*source.describe(), *source.extra]
    if not names or set(names) & expected.keys():
        return source
    prefix = ""
    while shared := _shared_prefix(names, len(prefix)):
        prefix += shared
        if {name[len(prefix) :] for name in names} == expected.keys():
            warn(f"{path}: all names begin with {prefix!r}, as a wrapper's do; it was left out.")
            return _Unwrapped(source, prefix)
    return source


def _shared_prefix(names: list[str], start: int) -> str:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix, start) for name in names):
            return prefix
    return ""


class _Unwrapped:
    """A source of weights whose names lack a prefix."""

    foreign = True

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self._source = source
        self._prefix = prefix
        self.extra = self._renamed(source.extra)
        # A submodule's name has no dot at its end; the wrapper itself has no place here.
        versions = {f"{name}.": value for name, value in source.versions.items()}
        self.versions = {
            name[len(prefix) : -1]: value
            for name, value in versions.items()
            if name.startswith(prefix)
        }

    def _renamed(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        return {name[len(self._prefix) :]: value for name, value in mapping.items()}

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name."""
        return self._renamed(self._source.describe())

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU."""
        return self._source.read(self._prefix + name)

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        self._source.read_into(self._prefix + name, tensor)
