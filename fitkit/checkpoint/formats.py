"""The formats of weight files, by the end of the file's name.

To add one, write a file with a class that has `write` and `open`, let it end with
`FORMATS.add(suffix, …)`, and import it in `checkpoint/__init__.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

import torch

from fitkit.arguments import describe
from fitkit.checkpoint.arrays import Numbering, TiedTensors
from fitkit.checkpoint.container import Reader, read_container, write_container
from fitkit.errors import ArgumentTypeError, CheckpointError
from fitkit.registry import Registry, unknown_name
from fitkit.version import __version__


@dataclass(frozen=True)
class Weights:
    """What a file of weights holds.

    Attributes:
        tensors: parameters and buffers by name; those that share their memory are tied.
        extra: what else the state dict has (`get_extra_state`): plain data.
        versions: the version of each submodule's state, by the submodule's name.
    """

    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    versions: Mapping[str, int]


class WeightSource(Protocol):
    """An open and checked file of weights."""

    @property
    def foreign(self) -> bool:
        """Whether other programs write such files too, with names as a wrapper gives them."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """The entries that aren't tensors."""

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of each submodule's state, where the format has them."""

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU, which stays when the file is closed."""

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype; several threads may.

        Raises:
            CheckpointError: it can't be read; the tensor may have some of its numbers.
        """


class WeightFormat(Protocol):
    """One way to put weights into a file."""

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write a file, whole or not at all."""

    def open(self, path: str | os.PathLike[str]) -> AbstractContextManager[WeightSource]:
        """Open a file after checking it; CheckpointError where it can't be trusted."""


FORMATS: Registry[WeightFormat] = Registry("suffix")


def format_of(path: str | os.PathLike[str]) -> WeightFormat:
    """The format that the end of the file's name asks for; case doesn't matter.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path={describe(path)} must be a string or a path.")
    suffix = PurePath(path).suffix
    if suffix not in FORMATS:
        hint = f"The format follows from the end of the file's name, here {os.fspath(path)!r}."
        raise unknown_name("suffix", suffix, FORMATS, hint)
    return FORMATS[suffix]


#: How the names of our HDF5 files end.
SUFFIXES = (".h5", ".hdf5")


class HDF5:
    """The format of `.h5` files: digest, tied tensors stored once, extra state as JSON."""

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write a file with nothing but `weights`."""
        numbering = Numbering()
        content = {
            "kind": "weights",
            "software": software(),
            "weights": encode_weights(weights, numbering),
        }
        write_container(path, content, numbering.arrays)

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[HDF5Weights]:
        """The weights in a checked file."""
        with read_container(path) as reader:
            yield HDF5Weights(os.fspath(path), reader)


def software() -> dict[str, str]:
    """The versions that a file is written with, for whoever looks into it."""
    return {"fitkit": __version__, "torch": str(torch.__version__)}


def encode_weights(weights: Weights, numbering: Numbering) -> dict[str, Any]:
    """The part of a document that describes `weights`, whose tensors get numbers."""
    return {
        "tensors": {name: numbering.add(tensor) for name, tensor in weights.tensors.items()},
        "extra": dict(weights.extra),
        "versions": dict(weights.versions),
    }


class HDF5Weights:
    """The weights in an open file.

    Attributes:
        extra: the entries of the state dict that aren't tensors.
        versions: the version of each submodule's state, by the submodule's name.
        foreign: whether other programs write such files too.
    """

    foreign = False

    def __init__(self, path: str, reader: Reader) -> None:
        part = reader.document.get("weights")
        if not isinstance(part, dict):
            raise CheckpointError(
                f"{path} has no weights in it: it holds {reader.document.get('kind')!r}. "
                "Give the path of a file of weights or of a checkpoint."
            )
        self.extra: Mapping[str, Any] = _mapping(path, part, "extra")
        self.versions: Mapping[str, int] = _mapping(path, part, "versions", int)
        self._numbers: dict[str, int] = _mapping(path, part, "tensors", int)
        if not all(0 <= number < len(reader) for number in self._numbers.values()):
            raise _refused(path, "it names arrays that it doesn't have")
        if self.extra.keys() & self._numbers.keys():
            raise _refused(path, "one name stands for a tensor and for other data")
        self._reader = reader
        self._tied = TiedTensors()

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name; reads none of them."""
        return {name: self._reader.describe(number) for name, number in self._numbers.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor of its own on the CPU; tied names get one, as long as it is in use."""
        number = self._numbers[name]
        return self._tied.get(number, lambda: self._reader.read(number))

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        self._reader.read_into(self._numbers[name], tensor)


def _mapping(path: str, part: dict[str, Any], key: str, kind: type = object) -> dict[str, Any]:
    value = part.get(key)
    # bool is an int to isinstance, and no number of an array.
    if not isinstance(value, dict) or not all(
        isinstance(item, kind) and not (kind is int and isinstance(item, bool))
        for item in value.values()
    ):
        raise _refused(path, f"the part {key!r} of its weights isn't as fitkit writes it")
    return value


def _refused(path: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is refused: {reason}. fitkit didn't write it. Use another.")


FORMATS.add(SUFFIXES[0], HDF5(), *SUFFIXES[1:])
