"""Weights as `torch.save` writes a state dict: `.pt`, `.pth`.

Such a file is a zip archive with a pickle in it. torch reads it with `weights_only=True`, which
makes nothing but tensors and plain data. torch itself checks no checksum, so ours comes first.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

import torch

from fitkit.errors import CheckpointError, ConfigurationError
from fitkit.seams.files import (
    HeldInterrupts,
    InMemory,
    OpenWeights,
    Weights,
    damaged,
    noted,
    open_file,
    replacing,
    state_of,
    storable,
    unreadable,
)

_ZIP = b"PK\x03\x04"
# The bit of a part's attributes by which DOS marks folders; names of folders end in a slash, too.
_FOLDER = 0x10
# Under which name programs put the weights where they save more than these.
_NESTED = ("state_dict", "model_state_dict")
# What Lightning writes beside the weights, of which people ask.
_FACTS = ("pytorch-lightning_version", "epoch", "global_step")
_HPARAMS = "hyper_parameters"
# As many of the names that a pickle asks for are listed.
_SHOWN_NAMES = 5


class TorchFile:
    """The format of `.pt` files: what `torch.load(path)` gives to `load_state_dict`."""

    holds: tuple[str, ...] = ("extra", "frozen")

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write a state dict, whole or not at all."""
        size_bytes = sum(item.numel() * item.element_size() for item in weights.tensors.values())
        with HeldInterrupts() as interrupts, replacing(path, size_bytes) as file:
            output = _Output(file)
            try:
                torch.save(weights.state_dict(), output)  # type: ignore[arg-type]
            except (KeyError, RuntimeError) as error:
                output.check()
                raise ConfigurationError(
                    f"{os.fspath(path)} can't be written: torch.save refuses the weights "
                    f"({error}). Save to a file that ends in .h5."
                ) from error
            output.check()
            interrupts.deliver()

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[OpenWeights]:
        """Give the weights in a file whose checksums are right."""
        name = os.fspath(path)
        # Opened once, so that torch reads what was checked; and read, not mapped: where another
        # process cuts a mapped file, the system ends the process that looks at it.
        with io.BufferedReader(open_file(path)) as file:  # type: ignore[type-var]
            state = state_of(file)
            with unreadable(name):
                _check(name, file)
            try:
                file.seek(0)
                with warnings.catch_warnings():  # of a pickle's protocol, which torch then refuses
                    warnings.simplefilter("ignore")
                    content = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
                if state_of(file) != state:
                    raise damaged(name, "it was written to while it was read")
                weights = _weights_in(name, content, state.size_bytes)
                weights.facts.update(self.facts(content))
                weights.beside = partial(self.beside, content)
            except CheckpointError:
                raise
            except Exception as error:
                # Not the cause: torch's own text advises to run what the file asks for.
                raise CheckpointError(_refusal(name, file, error)) from None
        yield weights

    def facts(self, content: object) -> dict[str, object]:
        """Return what a file says of itself beside its weights."""
        return {}

    def beside(self, content: object) -> dict[str, Any]:
        """Return all that a file has beside its weights."""
        return {}


class LightningFile(TorchFile):
    """Lightning's `.ckpt` files, for their weights: the same archive, with more beside these."""

    is_read_only = True

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Refuse: a file of that name is expected to hold what only Lightning can make."""
        raise ConfigurationError(
            f"{os.fspath(path)!r} would be one of Lightning's files, which fitkit can read but "
            "not write. The names of weight files end in .h5, .safetensors or .pt."
        )

    def facts(self, content: object) -> dict[str, object]:
        """Return how far the training was, and the hyperparameters of the module."""
        entries = _entries(content)
        found = {name: entries[name] for name in _FACTS if name in entries}
        hparams = _entries(entries.get(_HPARAMS))
        return {**found, **{f"hparams.{name}": value for name, value in hparams.items()}}

    def beside(self, content: object) -> dict[str, Any]:
        """Return all that Lightning's hooks find in a file beside the weights."""
        return {name: value for name, value in _entries(content).items() if name not in _NESTED}


def _refusal(name: str, file: BinaryIO, error: Exception) -> str:
    """Why torch didn't read a file, and what to do."""
    found = _unsafe_names(file, error)
    if not found:
        return (
            f"{name} isn't a file of weights that torch can read ({type(error).__name__}): it is "
            "damaged, or something else. Use another."
        )
    shown = ", ".join(found[:_SHOWN_NAMES]) + (", …" if len(found) > _SHOWN_NAMES else "")
    return (
        f"{name} is refused: beside tensors it holds {shown}, and making these would let it run "
        "any code. If you trust its author, read it with torch itself, "
        f"content = torch.load({name!r}, weights_only=False), and save its state dict: "
        "torch.save(content['state_dict'], 'weights.pt'), or content.state_dict() of a module."
    )


def _unsafe_names(file: BinaryIO, error: Exception) -> list[str]:
    """Return the classes and functions that a file's pickle asks for and torch doesn't give."""
    try:
        file.seek(0)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # no zip archive, or one that can't be read
        return re.findall(r"GLOBAL ([\w.]+)", str(error))


class _Output(io.RawIOBase):
    """A file for torch to write to, which keeps an error until torch is done.

    An exception that goes through torch's writer is raised again when that is destroyed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: BaseException | None = None

    def writable(self) -> bool:
        """Yes: torch asks."""
        return True

    def write(self, content: Any) -> int:
        """Write, or do nothing after a failure."""
        if self._error is None:
            try:
                self._file.write(content)
            except BaseException as error:
                self._error = error
        return len(content)

    def check(self) -> None:
        """Raise what stopped the writing."""
        if self._error is not None:
            raise self._error


def _check(name: str, file: BinaryIO) -> None:
    """Check what can be checked before torch sees the file; CheckpointError where it is damaged."""
    start = file.read(len(_ZIP))
    if not start:
        raise damaged(name, "it is empty")
    if start == _ZIP:
        _check_archive(name, file)


def _check_archive(name: str, file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise damaged(name, "it is compressed, which torch never does")
            if sum(member.file_size for member in members) > os.fstat(file.fileno()).st_size:
                raise damaged(name, "its parts declare more bytes than the file has")
            # Of a folder torch reads nothing, and leaves the memory for its numbers as it was.
            if any(m.external_attr & _FOLDER and not m.is_dir() for m in members):
                raise damaged(name, "a part of it is marked as a folder")
            # torch.serialization.set_crc32_options(False) leaves out all checksums.
            with_checksums = any(member.CRC for member in members)
            wrong = archive.testzip() if with_checksums else None
    except CheckpointError:
        raise
    except Exception as error:  # zipfile has many ways to fail on bytes that were changed
        raise damaged(name, f"its zip archive is broken ({error})") from error
    if wrong is not None:
        raise damaged(name, f"the checksum of its part {wrong!r} is wrong")


def _weights_in(path: str, content: object, file_bytes: int) -> OpenWeights:
    """Return the weights that a file had."""
    state, metadata = _state_dict(path, content)
    try:
        frozen = noted(metadata)
    except ValueError as error:
        raise CheckpointError(f"{path} is refused: {error}.") from None
    tensors = {
        name: _plain(path, name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    _check_sizes(path, tensors, file_bytes)
    places = {name: name for name in tensors}
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    extra = {name: value for name, value in state.items() if name not in tensors}
    rest = extra, _versions(metadata), frozen
    return OpenWeights(path, InMemory(tensors), places, described, *rest, foreign=True)


def _state_dict(path: str, content: object) -> tuple[dict[str, Any], object]:
    """Return the entries of the state dict in a file, and what torch keeps beside them."""
    entries = _entries(content)
    for key in _NESTED:
        if isinstance(entries.get(key), dict):
            content = entries[key]
            entries = _entries(content)
            break
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in entries):
        raise CheckpointError(
            f"{path} has no weights in it: it holds a {type(content).__name__} instead of a state "
            "dict. Save one with torch.save(net.state_dict(), path)."
        )
    return entries, vars(content).get("_metadata") if hasattr(content, "__dict__") else None


def _entries(content: object) -> dict[Any, Any]:
    """Return a dict's entries, by its class: a file may give it other methods, as attributes."""
    return dict(type(content).items(content)) if isinstance(content, dict) else {}


def _versions(metadata: object) -> dict[str, int]:
    """Return the version of each submodule's state."""
    noted = {name: _entries(entry).get("version") for name, entry in _entries(metadata).items()}
    return {n: v for n, v in noted.items() if isinstance(n, str) and type(v) is int}


def _plain(path: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        # By the class: a file may give a tensor other methods, as attributes.
        return storable(torch.Tensor.detach(tensor))
    except ConfigurationError as error:
        raise CheckpointError(f"{path}: {name!r} can't be loaded: {error}") from None


def _check_sizes(path: str, tensors: Mapping[str, torch.Tensor], file_bytes: int) -> None:
    """Refuse tensors that would take more memory than the file has bytes.

    Strides of zero let one number stand for any size; and torch makes memory larger for a tensor
    of a file without an archive, where that has too little.
    """
    storages = {}
    spread = 0
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        size_bytes = tensor.numel() * tensor.element_size()
        spread += size_bytes if size_bytes > storage.nbytes() else 0
    if max(sum(storages.values()), spread) > file_bytes:
        raise CheckpointError(
            f"{path} is refused: its tensors take more bytes than the file has. Save them in "
            "memory of their own: {name: tensor.clone() for name, tensor in state.items()}."
        )


TORCH, LIGHTNING = TorchFile(), LightningFile()
