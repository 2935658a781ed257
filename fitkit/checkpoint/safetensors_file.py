"""Weights in Hugging Face's format: `.safetensors`.

Eight bytes say how long the header is; the header is JSON and names each tensor's dtype, shape and
place; the numbers follow without gaps. That is so little that no package is needed for it.
Tied tensors are stored once; as in files of `safetensors.torch.save_model`, the header's
`__metadata__` says which stored name stands for each of the others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch

from fitkit.checkpoint.arrays import (
    LARGEST_RANK,
    Numbering,
    StoredArrays,
    TiedTensors,
    dtype_name,
    file_dtype,
    state_of,
    stored_shape,
    write_array,
)
from fitkit.checkpoint.atomic import HeldInterrupts, replacing
from fitkit.checkpoint.container import without_repetition
from fitkit.checkpoint.formats import FORMATS, Weights
from fitkit.checkpoint.header import damaged, digest_of, former, unreadable
from fitkit.errors import CheckpointError, ConfigurationError

# The format's names for dtypes, https://github.com/huggingface/safetensors (Dtype). Its F4 counts
# halves of bytes and torch's pairs of them, so that one is left out.
_NAMES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_DTYPES = {name: getattr(torch, ours) for ours, name in _NAMES.items() if hasattr(torch, ours)}

# The package allows 100 MB; parsed JSON takes some 20 times its size in memory.
_LARGEST_HEADER = 32 << 20
_METADATA = "__metadata__"
_OURS = "fitkit."
_VERSIONS = "fitkit.versions"
_DIGEST = "fitkit.xxh3-128"
_NO_DIGEST = "0" * 32
# What files have instead that were written before the first release.
_FORMER_DIGESTS = ("fitkit.sums", "fitkit.sha256")


class SafeTensors:
    """The format of `.safetensors` files: tensors only, with a digest in the files we write."""

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write tensors, whole or not at all."""
        write_tensors(path, weights, {})

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[SafeTensorsWeights]:
        """The weights in a checked file."""
        name = os.fspath(path)
        with contextlib.ExitStack() as stack:
            try:
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise CheckpointError(
                        f"{name} can't be read: it isn't a file. Give the path of one."
                    )
                file = stack.enter_context(open(path, "rb", buffering=0))
                weights = SafeTensorsWeights(name, file)
            except (FileNotFoundError, CheckpointError):
                raise
            except ValueError as error:
                raise damaged(name, str(error)) from error
            except OSError as error:
                raise CheckpointError(
                    f"{name} can't be read: {error.strerror or error}. Check the path and its "
                    "rights."
                ) from error
            yield weights


def write_tensors(path: str | os.PathLike[str], weights: Weights, texts: Mapping[str, str]) -> str:
    """Write tensors to a file, whole or not at all, and other texts into its header.

    Returns:
        The file's digest.
    """
    if weights.extra:
        raise ConfigurationError(
            f"state_dict[{next(iter(weights.extra))!r}] isn't a tensor, and a .safetensors "
            "file holds nothing else. Save to a file that ends in .h5."
        )
    numbering = Numbering()
    numbers = {name: numbering.add(tensor) for name, tensor in weights.tensors.items()}
    for name, tensor in weights.tensors.items():
        _check_dtype(name, tensor)
    header = _header(numbers, numbering.arrays, weights.versions)
    header[_METADATA].update(texts)
    size_bytes = sum(item.numel() * item.element_size() for item in numbering.arrays)
    with HeldInterrupts() as interrupts, replacing(path, size_bytes) as file:
        end = file.write(_encode(header))
        for number in _in_file_order(numbering.arrays):
            tensor = numbering.arrays[number]
            write_array(file, end, tensor)
            end += tensor.nbytes
            interrupts.deliver()
        header[_METADATA][_DIGEST] = digest_of(file, 0)
        file.seek(0)
        file.write(_encode(header))
        interrupts.deliver()
    return str(header[_METADATA][_DIGEST])


def has_dtype(tensor: torch.Tensor) -> bool:
    """Whether the format has a tensor's dtype."""
    return dtype_name(tensor.dtype) in _NAMES


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if not has_dtype(tensor):
        raise ConfigurationError(
            f"state_dict[{name!r}] is of {tensor.dtype}, which .safetensors doesn't have. Save to "
            "a file that ends in .h5, or convert it first."
        )


def _in_file_order(arrays: list[torch.Tensor]) -> list[int]:
    """The numbers of the arrays, those of large elements first, so that all are aligned."""
    return sorted(range(len(arrays)), key=lambda number: -arrays[number].element_size())


def _header(
    numbers: Mapping[str, int], arrays: list[torch.Tensor], versions: Mapping[str, int]
) -> dict[str, Any]:
    places = {}
    end = 0
    for number in _in_file_order(arrays):
        begin, end = end, end + arrays[number].nbytes
        places[number] = [begin, end]
    metadata = {"format": "pt", _VERSIONS: json.dumps(versions), _DIGEST: _NO_DIGEST}
    header: dict[str, Any] = {_METADATA: metadata}
    stored: dict[int, str] = {}
    for name, number in numbers.items():
        if name in ("format", _VERSIONS, _DIGEST, _METADATA):
            raise ConfigurationError(f"A .safetensors file can't hold the name {name!r}.")
        kept = stored.setdefault(number, name)
        if kept != name:
            metadata[name] = kept
            continue
        header[name] = {
            "dtype": _NAMES[dtype_name(arrays[number].dtype)],
            "shape": list(arrays[number].shape),
            "data_offsets": places[number],
        }
    return header


def _encode(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(text) > _LARGEST_HEADER:
        raise ConfigurationError("There are more names than a .safetensors file can hold.")
    # Blanks at the end let the numbers begin where a processor likes to read them.
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


class SafeTensorsWeights:
    """The weights in an open file whose header, and digest if it has one, are right.

    Attributes:
        extra: nothing.
        versions: the version of each submodule's state, where fitkit wrote the file.
        metadata: the texts that the file has beside its tensors.
        digest: that of a file that we wrote, which was checked; None for others.
        aliases: further names of tensors, each with the one that its numbers are stored under.
        foreign: other programs write such files too.
    """

    foreign = True

    def __init__(self, path: str, file: BinaryIO) -> None:
        state = state_of(file)
        header, text, end = _read_header(file)
        start = 8 + len(text)
        self.metadata = _texts(header.pop(_METADATA, {}))
        self.extra: Mapping[str, Any] = {}
        self.versions = _versions(self.metadata)
        self._path = path
        self._entries = {name: _entry(name, entry, start) for name, entry in header.items()}
        _check_places(self._entries, start, end)
        self.digest = _checked_digest(path, self.metadata, text, file)
        self.aliases = {
            name: kept
            for name, kept in self.metadata.items()
            if name not in header and name != "format" and kept in header
        }
        for name, kept in self.aliases.items():
            self._entries[name] = self._entries[kept]
        self._arrays = StoredArrays(file, state)
        self._tied = TiedTensors()

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name."""
        return {name: (shape, dtype) for name, (_, shape, dtype) in self._entries.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor of its own on the CPU; tied names get one, as long as it is in use."""
        entry = self._entries[name]
        with unreadable(self._path):
            return self._tied.get(id(entry), lambda: self._arrays.read(*entry))

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        with unreadable(self._path):
            self._arrays.read_into(self._entries[name][0], tensor)


_Entry = tuple[int, tuple[int, ...], torch.dtype]


def _checked_digest(
    path: str, metadata: Mapping[str, str], text: bytes, file: BinaryIO
) -> str | None:
    """The digest of a file that we wrote, if it is right; others have none.

    It is that of the whole file with zeros in the digest's place.
    """
    if not any(key.startswith(_OURS) for key in metadata):
        return None
    stated = metadata.get(_DIGEST, "")
    if not stated and any(key in metadata for key in _FORMER_DIGESTS):
        raise former(path)
    blank = text.replace(stated.encode("ascii", "replace"), _NO_DIGEST.encode("ascii"), 1)
    before = len(text).to_bytes(8, "little") + blank
    if len(stated) != len(_NO_DIGEST) or digest_of(file, len(before), before) != stated:
        raise ValueError(
            "its content doesn't match its digest, so it was changed (a program that writes "
            f"other tensors has to leave out the metadata that begin with {_OURS!r})"
        )
    return stated


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], bytes, int]:
    """The header, its bytes, and where the file ends."""
    end = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if end < 8 or length > min(end - 8, _LARGEST_HEADER):
        raise ValueError("its header is incomplete, or it is no .safetensors file")
    text = file.read(length)
    if not text.startswith(b"{"):
        raise ValueError("its header isn't JSON, so it is no .safetensors file")
    try:
        # Of bytes, json would take UTF-16 and UTF-32 too.
        header = json.loads(text.decode("utf-8"), object_pairs_hook=without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header can't be read ({type(error).__name__}: {error})") from None
    if not isinstance(header, dict):
        raise ValueError("its header isn't an object")
    return header, text, end


def _texts(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata aren't texts")
    return metadata


def _versions(metadata: Mapping[str, str]) -> dict[str, int]:
    try:
        versions = json.loads(metadata.get(_VERSIONS, "{}"))
    except (ValueError, RecursionError):
        raise ValueError("its versions can't be read") from None
    if not isinstance(versions, dict) or not all(type(v) is int for v in versions.values()):
        raise ValueError("its versions can't be read")
    return versions


def _entry(name: str, entry: Any, start: int) -> _Entry:
    if not isinstance(entry, dict):
        raise ValueError(f"its header doesn't describe {name!r}")
    shape, places = _counts(name, entry.get("shape")), _counts(name, entry.get("data_offsets"))
    if len(places) != 2 or len(shape) > LARGEST_RANK:
        raise ValueError(f"its header doesn't describe {name!r}")
    dtype = _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise ValueError(f"{name!r} has the dtype {str(entry.get('dtype'))[:40]!r}, unknown here")
    size_bytes = math.prod(stored_shape(dtype, shape)) * file_dtype(dtype).itemsize
    if places[1] - places[0] != size_bytes:
        raise ValueError(f"{name!r} has another size than its shape and dtype say")
    return start + places[0], shape, dtype


def _counts(name: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    ):
        raise ValueError(f"its header doesn't describe {name!r}")
    return tuple(values)


def _check_places(entries: Mapping[str, _Entry], start: int, end: int) -> None:
    """Refuse gaps, overlaps and numbers beyond the file's end, as the format does."""
    position = start
    for offset, shape, dtype in sorted(entries.values(), key=lambda entry: entry[0]):
        if offset != position:
            # An empty tensor may stand at any border; sorting keeps it before its neighbour.
            if math.prod(shape) == 0 and offset <= position:
                continue
            raise ValueError("its tensors overlap or have gaps between them")
        position += math.prod(stored_shape(dtype, shape)) * file_dtype(dtype).itemsize
    if position != end:
        raise ValueError(f"its tensors take {position - start} bytes, and {end - start} are there")


FORMATS.add(".safetensors", SafeTensors())
