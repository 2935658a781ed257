"""The formats of weight files, by the end of the file's name.

To add one, write a file with a class that has `write` and `open`, and add a line below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

import torch

from fitkit.arguments import describe
from fitkit.checkpoint.hdf5 import HDF5, SUFFIXES
from fitkit.checkpoint.safetensors_file import SafeTensors
from fitkit.checkpoint.torch_file import LightningFile, TorchFile
from fitkit.errors import ArgumentTypeError
from fitkit.registry import Registry, unknown_name


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
FORMATS.add(SUFFIXES[0], HDF5(), *SUFFIXES[1:])
FORMATS.add(".safetensors", SafeTensors())
FORMATS.add(".pt", TorchFile(), ".pth")
FORMATS.add(".ckpt", LightningFile())


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
