"""Reading a folder of shards: its index, and tensors put together from chunks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fitkit.checkpoint.arrays import LARGEST_RANK, TiedTensors, dtype_named
from fitkit.checkpoint.container import Reader, read_container, refusals
from fitkit.checkpoint.folders import INDEX, SHARD
from fitkit.checkpoint.header import damaged
from fitkit.checkpoint.safetensors_file import SafeTensors, SafeTensorsWeights
from fitkit.errors import CheckpointError

SHARDING = "DCP_SHARDING_INFO"
"""The text in a shard that says where its chunks begin, by torch's name for it."""

_MOST_CUT = 4
"""A mesh of ranks has one or two dimensions, and so many of a tensor's are cut."""


def read_index(path: str | os.PathLike[str], stack: contextlib.ExitStack) -> Reader:
    """The checked index of a folder, which stays open as long as the stack.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it isn't a folder of ours, or its index is damaged.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"There is no folder {os.fspath(path)}.")
    if not (folder / INDEX).is_file():
        other = (
            " torch.distributed.checkpoint wrote it, with a pickle in it, which can run code when "
            "it is read; where you trust it, load it with torch's own functions."
            if (folder / ".metadata").is_file()
            else " Give the path of a folder that save wrote."
        )
        raise CheckpointError(f"{os.fspath(path)} isn't a checkpoint of fitkit's.{other}")
    return stack.enter_context(read_container(folder / INDEX))


@dataclass(frozen=True)
class Part:
    """A chunk of a tensor: the file that has it, where it belongs, its shape and dtype."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Spread:
    """A tensor whose chunks lie in shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


class Shards:
    """The tensors in a folder's shards, by name.

    Args:
        folder: where they are.
        reader: the folder's index.
        stack: keeps files open.

    Attributes:
        tensors: what each one is.
        files: the shards, with their digests.

    Raises:
        CheckpointError: a shard is missing, damaged or another save's.
    """

    def __init__(self, folder: Path, reader: Reader, stack: contextlib.ExitStack) -> None:
        name = str(folder)
        with refusals(name):
            document = reader.document
            self.files = _texts(document.get("files"))
            described = _dict(document.get("shards"))
        self._open = {
            file: _opened(folder, file, digest, stack) for file, digest in self.files.items()
        }
        with refusals(name):
            parts: dict[str, list[Part]] = {key: [] for key in described}
            for file, opened in self._open.items():
                _note_chunks(file, opened, parts)
            self.tensors = {
                key: _spread(key, entry, tuple(parts[key])) for key, entry in described.items()
            }

    def read(self, key: str) -> torch.Tensor:
        """A tensor of its own on the CPU."""
        spread = self.tensors[key]
        tensor = torch.empty(spread.shape, dtype=spread.dtype)
        self.read_into(key, tensor)
        return tensor

    def read_into(self, key: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into one of its shape and dtype."""
        for part in self.tensors[key].parts:
            ends = map(sum, zip(part.offsets, part.sizes, strict=True))
            chunk = tensor.detach()[tuple(map(slice, part.offsets, ends))]
            self._open[part.file].read_into(key, chunk)


def _opened(
    folder: Path, name: str, digest: str, stack: contextlib.ExitStack
) -> SafeTensorsWeights:
    path = folder / name
    if not path.is_file():
        raise damaged(str(folder), f"{name} is missing")
    file = stack.enter_context(SafeTensors().open(path))
    if file.digest != digest:
        raise damaged(str(folder), f"{name} belongs to another save")
    return file


def _note_chunks(name: str, file: SafeTensorsWeights, parts: dict[str, list[Part]]) -> None:
    """Add a shard's chunks to those of the tensors that they are of."""
    if file.aliases:  # each name would be read into memory of its own
        raise ValueError(f"{name} has one chunk under several names")
    try:
        places = _dict(json.loads(file.metadata.get(SHARDING, "")))
    except (ValueError, RecursionError):
        raise ValueError(f"{name} doesn't say where its chunks are") from None
    for key, (sizes, dtype) in file.describe().items():
        begin = _counts(_dict(places.get(key)).get("saved_offsets"))
        if key not in parts or len(begin) != len(sizes):
            raise ValueError(f"{name} doesn't say where its chunk of {key!r} is")
        parts[key].append(Part(name, begin, sizes, dtype))


class FolderWeights:
    """The weights in an open folder.

    Attributes:
        extra: the entries of the state dict that aren't tensors.
        versions: the version of each submodule's state, by the submodule's name.
        foreign: whether other programs write such folders too.
    """

    foreign = False

    def __init__(self, path: str, reader: Reader, shards: Shards) -> None:
        self._numbers = Numbers(path, reader, shards)
        with refusals(path):
            part = _dict(reader.document.get("weights"))
            self.extra: Mapping[str, Any] = _dict(part.get("extra"))
            self.versions: Mapping[str, int] = _dict(part.get("versions"))
            self._places = _dict(part.get("tensors"))
            if self.extra.keys() & self._places.keys():
                raise ValueError("one name stands for a tensor and for other data")
            if not all(type(version) is int for version in self.versions.values()):
                raise ValueError("its versions aren't numbers")
            for place in self._places.values():
                self._numbers.check(place)
        self._tied = TiedTensors()

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name; reads none of them."""
        return {name: self._numbers.described(place) for name, place in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor of its own on the CPU; tied names get one, as long as it is in use."""
        place = self._places[name]
        return self._tied.get(place, lambda: self._numbers.read(place))

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        self._numbers.read_into(self._places[name], tensor)


class Numbers:
    """The tensors of a folder by their places: an array in the index, or a name in the shards."""

    def __init__(self, path: str, reader: Reader, shards: Shards) -> None:
        self._reader = reader
        self._shards = shards
        with refusals(path):
            places = reader.document.get("numbers")
            if not isinstance(places, list):
                raise ValueError("it doesn't say where its tensors are")
            self._places = places
            for place in places:
                self.check(place)
            if len(set(places)) < len(places):  # each would be read into memory of its own
                raise ValueError("two numbers stand for the same tensor")

    def __len__(self) -> int:
        return len(self._places)

    def describe(self, number: int) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the tensor that the state gives a number."""
        return self.described(self._places[number])

    def check(self, place: object) -> None:
        """Refuse a place that there isn't."""
        is_array = type(place) is int and 0 <= place < len(self._reader)
        if not (is_array or (isinstance(place, str) and place in self._shards.tensors)):
            raise ValueError("it names tensors that it doesn't have")

    def described(self, place: Any) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of what is at a place."""
        if isinstance(place, str):
            spread = self._shards.tensors[place]
            return spread.shape, spread.dtype
        return self._reader.describe(place)

    def read(self, place: Any) -> torch.Tensor:
        """What is at a place, as a tensor of its own on the CPU."""
        return (self._shards if isinstance(place, str) else self._reader).read(place)

    def read_into(self, place: Any, tensor: torch.Tensor) -> None:
        """Copy what is at a place into a tensor of its shape and dtype."""
        (self._shards if isinstance(place, str) else self._reader).read_into(place, tensor)

    def numbered(self, number: int) -> torch.Tensor:
        """The tensor that the state gives a number; ValueError where there is none."""
        if number >= len(self._places):
            raise ValueError("its state names tensors that it doesn't have")
        return self.read(self._places[number])


def _spread(key: str, entry: object, parts: tuple[Part, ...]) -> Spread:
    """A tensor, whose chunks are its whole."""
    described = _dict(entry)
    shape, name = _counts(described.get("shape")), described.get("dtype")
    dtype = dtype_named(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"the dtype {name!r} of {key!r} is unknown to this torch or fitkit")
    if math.prod(size or 1 for size in shape) >= 1 << 63:
        raise ValueError("its index has an impossible shape")
    alike = all(part.dtype == dtype and len(part.sizes) == len(shape) for part in parts)
    if not alike or not _make_up(shape, parts):
        raise ValueError(f"the chunks of {key!r} don't make it up")
    return Spread(shape, dtype, parts)


def _make_up(shape: tuple[int, ...], parts: tuple[Part, ...]) -> bool:
    """Whether chunks fill a shape: no gap, no number twice, none outside.

    Corners tell, counted with the sign of a difference along each dimension: those of chunks side
    by side cancel, and the whole's remain. Dimensions that no chunk cuts needn't be looked at.
    """
    cut = [d for d, size in enumerate(shape) if any(part.sizes[d] != size for part in parts)]
    if len(cut) > _MOST_CUT or any(
        part.offsets[d] for part in parts for d in range(len(shape)) if d not in cut
    ):
        return False
    if math.prod(shape) == 0:
        return all(math.prod(part.sizes) == 0 for part in parts)
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(part.offsets, part.sizes, 1) for part in parts]
    for begin, sizes, weight in (*boxes, ((0,) * len(shape), shape, -1)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            place = tuple(begin[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
            corners[place] += weight * (-1) ** sum(ends)
    return not any(corners.values())


def _texts(found: object) -> dict[str, str]:
    texts = _dict(found)
    if not all(SHARD.fullmatch(name) and isinstance(text, str) for name, text in texts.items()):
        raise ValueError("it names files that fitkit never writes")
    return texts


def _dict(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("its index isn't as fitkit writes it")
    return found


def _counts(found: object) -> tuple[int, ...]:
    if (
        not isinstance(found, list)
        or len(found) > LARGEST_RANK
        or not all(type(size) is int and 0 <= size < 1 << 63 for size in found)
    ):
        raise ValueError("its index has an impossible shape")
    return tuple(found)
