"""Weights in Hugging Face's format: `.safetensors`.

Eight bytes say how long the header is; the header is JSON and names each tensor's dtype, shape and
place; the numbers follow without gaps. The `safetensors` package reads and checks headers. It can't
write ours: it needs all numbers in memory at once, or a path that it replaces by itself, and puts
the texts of `__metadata__` into another order each time.
Tied tensors are stored once; as in files of `safetensors.torch.save_model`, the header's
`__metadata__` says which stored name stands for each of the others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Container, Iterator, Mapping
from typing import Any, BinaryIO

import torch

from fitkit.arguments import dtype_name
from fitkit.errors import ConfigurationError
from fitkit.seams.checkpoints import (
    LARGEST_RANK,
    NO_DIGEST,
    Described,
    Numbering,
    StoredArrays,
    decode_extra,
    digest_of,
    encode_extra,
    former,
    write_array,
)
from fitkit.seams.files import (
    Frozen,
    HeldInterrupts,
    OpenWeights,
    Weights,
    damaged,
    is_url,
    open_file,
    remote,
    replacing,
    state_of,
    unreadable,
)

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

# The package allows 100 MB, of which each name takes more in memory.
_LARGEST_HEADER = 32 << 20
_METADATA = "__metadata__"
_OURS = "fitkit."
_VERSIONS = "fitkit.versions"
_EXTRA = "fitkit.extra"
_FROZEN = "fitkit.frozen"
_DIGEST = "fitkit.xxh3-128"
# What files have instead that were written before the first release.
_FORMER_DIGESTS = ("fitkit.sums", "fitkit.sha256")


class SafeTensors:
    """The format of `.safetensors` files: tensors only, with a digest in the files we write."""

    holds: tuple[str, ...] = ("extra", "frozen")

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write tensors, whole or not at all."""
        write_tensors(path, weights, {})

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[OpenWeights]:
        """Give the weights in a checked file."""
        name = os.fspath(path)
        with open_tensors(path) as file:
            places = {**{tensor: tensor for tensor in file.described}, **file.aliases}
            described = {tensor: file.described[place] for tensor, place in places.items()}
            extra = _extra(name, file.metadata, places)
            texts = _versions(name, file.metadata), _frozen(name, file.metadata)
            yield OpenWeights(name, file, places, described, extra, *texts, foreign=True)


def write_tensors(path: str | os.PathLike[str], weights: Weights, texts: Mapping[str, str]) -> str:
    """Write tensors to a file, whole or not at all, and other texts into its header.

    Returns:
        The file's digest.
    """
    metadata = {"format": "pt", _VERSIONS: json.dumps(weights.versions), _DIGEST: NO_DIGEST}
    if weights.frozen.dtypes:
        metadata[_FROZEN] = json.dumps(weights.frozen.as_data())
    if weights.extra:
        metadata[_EXTRA] = json.dumps(encode_extra(weights.extra, _NoTensors()))
    header: dict[str, Any] = {_METADATA: metadata}
    numbering = Numbering()
    names: dict[int, str] = {}
    for name, tensor in weights.tensors.items():
        if name in ("format", _VERSIONS, _EXTRA, _FROZEN, _DIGEST, _METADATA):
            raise ConfigurationError(f"A .safetensors file can't hold the name {name!r}.")
        if not has_dtype(tensor):
            raise ConfigurationError(
                f"state_dict[{name!r}] is of {tensor.dtype}, which .safetensors doesn't have. Save "
                "to a file that ends in .h5, or convert it first."
            )
        kept = names.setdefault(numbering.add(tensor), name)
        if kept != name:
            metadata[name] = kept
    metadata.update(texts)
    # Large elements first, so that all are aligned.
    arrays = {names[number]: tensor for number, tensor in enumerate(numbering.arrays)}
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].element_size()))
    end = 0
    for name, tensor in arrays.items():
        header[name] = {
            "dtype": _NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    with HeldInterrupts() as interrupts, replacing(path, end) as file:
        position = file.write(_encode(header))
        for tensor in arrays.values():
            write_array(file, position, tensor)
            position += tensor.nbytes
            interrupts.deliver()
        metadata[_DIGEST] = digest_of(file, 0)
        file.seek(0)
        file.write(_encode(header))
        interrupts.deliver()
    return metadata[_DIGEST]


class _NoTensors(Numbering):
    """Refuses tensors among other values: the header has only texts."""

    def add(self, value: object) -> int:
        raise ConfigurationError(
            "a .safetensors file can't hold a tensor within other values. Save to a file that ends "
            "in .h5."
        )


def has_dtype(tensor: torch.Tensor) -> bool:
    """Whether the format has a tensor's dtype."""
    return dtype_name(tensor.dtype) in _NAMES


def _encode(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(text) > _LARGEST_HEADER:
        raise ConfigurationError("There are more names than a .safetensors file can hold.")
    # Blanks at the end let the numbers begin where a processor likes to read them.
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(
    name: str, path: str | os.PathLike[str], file: BinaryIO
) -> tuple[bytes, dict[str, str], dict[str, tuple[str, tuple[int, ...]]]]:
    """Return the header's bytes; its texts; the tensors' dtypes and shapes, as they lie in the
    file.

    Raises:
        CheckpointError: it isn't as the format says, or the tensors don't lie side by side up to
            the file's end.
    """
    from safetensors import SafetensorError, safe_open

    length = int.from_bytes(file.read(8), "little")
    # The package would take longer ones, and memory for them.
    if length > min(os.fstat(file.fileno()).st_size - 8, _LARGEST_HEADER):
        raise damaged(name, "its header is incomplete, or it is no .safetensors file")
    text = file.read(length)
    try:
        with safe_open(os.fspath(path), "pt", backend="pread") as opened:
            parts = {key: opened.get_slice(key) for key in opened.offset_keys()}
            listed = {n: (p.get_dtype(), tuple(p.get_shape())) for n, p in parts.items()}
            return text, opened.metadata() or {}, listed
    except SafetensorError as error:
        raise damaged(name, f"it is no .safetensors file ({error})") from error


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[SafeTensorsFile]:
    """Open a file after checking its header, and its digest if it has one.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it can't be read, is none of the format, or was changed.
    """
    name = os.fspath(path)
    with contextlib.ExitStack() as stack:
        if is_url(path):
            path = stack.enter_context(remote.urls.downloaded(name))
        while True:
            file = stack.enter_context(open_file(path))
            with unreadable(name):
                header = _read_header(name, path, file)
            # Of another file, where one was renamed to the path meanwhile.
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                break
        with unreadable(name):
            found = SafeTensorsFile(name, file, *header)
        yield found


class SafeTensorsFile:
    """An open file whose header, and digest if it has one, are right; its tensors by their names.

    Attributes:
        metadata: the texts that the file has beside its tensors.
        described: the shape and dtype of each tensor, by name.
        aliases: further names of tensors, each with the one that its numbers are stored under.
        digest: that of a file that we wrote, which was checked; None for others.
    """

    def __init__(
        self,
        path: str,
        file: BinaryIO,
        text: bytes,
        metadata: dict[str, str],
        listed: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> None:
        state = state_of(file)
        self.metadata = metadata
        self.described: dict[str, Described] = {}
        self._offsets: dict[str, int] = {}
        end = 8 + len(text)
        for name, (kind, shape) in listed.items():
            dtype = _DTYPES.get(kind)
            if dtype is None or len(shape) > LARGEST_RANK:
                raise damaged(path, f"{name!r} is of {kind} {shape}, unknown here")
            self.described[name] = shape, dtype
            self._offsets[name] = end
            end += math.prod(shape) * dtype.itemsize
        self.digest: str | None = _checked_digest(path, metadata, text, file)
        self.aliases: dict[str, str] = {
            name: kept
            for name, kept in metadata.items()
            if name not in listed and name != "format" and kept in listed
        }
        self._path = path
        self._arrays = StoredArrays(file, state)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of its own on the CPU."""
        with unreadable(self._path):
            return self._arrays.read(self._offsets[name], *self.described[name])

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        with unreadable(self._path):
            self._arrays.read_into(self._offsets[name], tensor)


def _checked_digest(
    path: str, metadata: Mapping[str, str], text: bytes, file: BinaryIO
) -> str | None:
    """Return the digest of a file that we wrote, if it is right; others have none.

    It is that of the whole file with zeros in the digest's place.
    """
    if not any(key.startswith(_OURS) for key in metadata):
        return None
    stated = metadata.get(_DIGEST, "")
    if not stated and any(key in metadata for key in _FORMER_DIGESTS):
        raise former(path)
    blank = text.replace(stated.encode("ascii", "replace"), NO_DIGEST.encode("ascii"), 1)
    before = len(text).to_bytes(8, "little") + blank
    if len(stated) != len(NO_DIGEST) or digest_of(file, len(before), before) != stated:
        raise damaged(
            path,
            "its content doesn't match its digest, so it was changed (a program that writes "
            f"other tensors has to leave out the metadata that begin with {_OURS!r})",
        )
    return stated


def _versions(path: str, metadata: Mapping[str, str]) -> dict[str, int]:
    with contextlib.suppress(ValueError, RecursionError):
        versions = json.loads(metadata.get(_VERSIONS, "{}"))
        if isinstance(versions, dict) and all(type(v) is int for v in versions.values()):
            return versions
    raise damaged(path, "its versions can't be read")


def _extra(path: str, metadata: Mapping[str, str], tensors: Container[str]) -> dict[str, Any]:
    def refuse(number: int) -> torch.Tensor:
        raise ValueError("it names tensors")

    try:
        extra = decode_extra(json.loads(metadata.get(_EXTRA, "{}")), refuse)
    except (ValueError, RecursionError):
        raise damaged(path, "its entries that aren't tensors can't be read") from None
    if any(name in tensors for name in extra):
        raise damaged(path, "one name stands for a tensor and for other data")
    return extra


def _frozen(path: str, metadata: Mapping[str, str]) -> Frozen:
    try:
        return Frozen.from_data(json.loads(metadata.get(_FROZEN, "null")))
    except (ValueError, RecursionError):
        raise damaged(path, "its note of what it leaves out can't be read") from None


SAFETENSORS = SafeTensors()
