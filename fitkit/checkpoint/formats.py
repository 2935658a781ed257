"""The formats of weight files, by the end of the file's name.

To add one, write a file in `extras/` with a class that has `write` and `open`, and promise it here.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

from fitkit.arguments import describe
from fitkit.checkpoint.arrays import Described, Numbering
from fitkit.checkpoint.codec import decode_state, encode_state
from fitkit.checkpoint.container import read_container, refusals, write_container
from fitkit.checkpoint.frozen import NOTHING_FROZEN, Frozen, add_note
from fitkit.distributed.collectives import Collectives
from fitkit.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    FitkitError,
    is_out_of_memory,
)
from fitkit.registry import Registry, unknown_name
from fitkit.version import __version__


@dataclass(frozen=True)
class Weights:
    """The content of a file of weights.

    Attributes:
        tensors: parameters and buffers by name. Those that share their memory are tied.
        extra: the other entries of the state dict (`get_extra_state`): plain data and tensors.
        versions: the version of each submodule's state, by the submodule's name.
        frozen: the parameters that are left out on purpose.
    """

    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    versions: Mapping[str, int]
    frozen: Frozen = NOTHING_FROZEN

    def state_dict(self) -> OrderedDict[str, Any]:
        """All of it as a state dict, which has the versions as an attribute."""
        state: OrderedDict[str, Any] = OrderedDict({**self.tensors, **self.extra})
        metadata: OrderedDict[str, Any] = OrderedDict()
        metadata.update((name, {"version": v}) for name, v in self.versions.items())
        add_note(metadata, self.frozen)
        state._metadata = metadata  # type: ignore[attr-defined]
        return state


class WeightSource(Protocol):
    """An open and checked file of weights, as the `open` of a format gives it.

    What its methods raise reaches users as a CheckpointError with the file's name.
    """

    @property
    def foreign(self) -> bool:
        """Whether other programs write such files too, with names as a wrapper gives them."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """The entries that aren't tensors."""

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of each submodule's state, where the format has them."""

    @property
    def frozen(self) -> Frozen:
        """The parameters that are left out on purpose. May be absent if the format holds none."""

    def describe(self) -> dict[str, Described]:
        """Return the shape and dtype of each tensor, by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor of that name, on the CPU, which stays when the file is closed."""

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype; several threads may.

        After an error, the tensor may have some of its numbers.
        """


class WeightFormat(Protocol):
    """One way to put weights into a file.

    An attribute `holds` names what its files hold beside tensors: `("extra", "frozen")`, or one of
    them. Weights that have what isn't there are refused before `write` is called.
    """

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write a file, whole or not at all."""

    def open(self, path: str | os.PathLike[str]) -> AbstractContextManager[WeightSource]:
        """Open a file after checking it."""


def _is_format(entry: Any) -> bool:
    has_both = all(callable(getattr(entry, name, None)) for name in ("write", "open"))
    return has_both and not isinstance(entry, type)


FORMATS: Registry[WeightFormat] = Registry(
    "suffix",
    group="fitkit.formats",
    accepts=_is_format,
    expected="an object with write and open",
)


def written_suffixes() -> tuple[str, ...]:
    """Return the ends of the names of weight files that can be written, not only read."""
    return tuple(suffix for suffix in FORMATS if _is_written(suffix))


def _is_written(suffix: str) -> bool:
    try:
        return not getattr(FORMATS[suffix], "is_read_only", False)
    except FitkitError:  # an installed package's mistake, which its own name tells
        return False


def format_of(path: str | os.PathLike[str]) -> WeightFormat:
    """Return the format that the end of the file's name asks for; case doesn't matter.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path={describe(path)} must be a string or a path.")
    suffix = PurePath(path).suffix
    if suffix not in FORMATS and suffix and suffix[1:] in FORMATS:
        raise ConfigurationError(
            f"suffix={suffix!r} is registered as {suffix[1:]!r}, without its dot. A format's name "
            "begins with the dot."
        )
    if suffix not in FORMATS:
        hint = f"The format follows from the end of the file's name, here {os.fspath(path)!r}."
        raise unknown_name("suffix", suffix, FORMATS, hint)
    return FORMATS[suffix]


def check_holds(path: str | os.PathLike[str], weights: Weights) -> None:
    """Refuse weights of which the format would lose a part, so that no file lacks it.

    Raises:
        ConfigurationError: with the part that its files don't hold.
    """
    held = getattr(format_of(path), "holds", ())
    what = f"{os.fspath(path)} can't be written: its format, {PurePath(path).suffix}, "
    if weights.extra and "extra" not in held:
        raise ConfigurationError(
            f"{what}holds no state but tensors, and {', '.join(map(repr, weights.extra))} "
            "(get_extra_state) would be lost. Save to a file that ends in .h5."
        )
    if weights.frozen.dtypes and "frozen" not in held:
        raise ConfigurationError(
            f"{what}can't say which parameters trainable_only=True left out, so the file couldn't "
            "be loaded again. Leave trainable_only out, or save to a file that ends in .h5."
        )


class TensorReader(Protocol):
    """What reads the tensors of an open file by their places, which each format chooses."""

    def read(self, place: Any) -> torch.Tensor:
        """Return what is at a place, as a tensor of its own on the CPU."""

    def read_into(self, place: Any, tensor: torch.Tensor) -> None:
        """Copy what is at a place into a tensor of its shape and dtype."""


class InMemory:
    """Tensors that were read already, by their names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor of that name, on the CPU."""
        return self._tensors[name]

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        with torch.no_grad():
            tensor.copy_(self._tensors[name])


@dataclass
class OpenWeights:
    """The weights in an open file of any format.

    Attributes:
        path: what the file is called in messages.
        reader: reads a tensor by its place.
        places: where each tensor is, by name; tied names have one place.
        described: the shape and dtype of each tensor, by name.
        extra: the entries of the state dict that aren't tensors.
        versions: the version of each submodule's state, by the submodule's name.
        frozen: the parameters that are left out on purpose.
        foreign: whether other programs write such files too.
        facts: what the file says of itself beside the weights, for people.
        beside: returns all else in the file, for a model's own hooks; nothing of a file that has
            weights alone.
    """

    path: str
    reader: TensorReader
    places: Mapping[str, Any]
    described: dict[str, Described]
    extra: Mapping[str, Any]
    versions: Mapping[str, int]
    frozen: Frozen = NOTHING_FROZEN
    foreign: bool = False
    facts: dict[str, object] = field(default_factory=dict)
    beside: Callable[[], dict[str, Any]] = dict

    def __post_init__(self) -> None:
        self._used: WeakValueDictionary[Any, torch.Tensor] = WeakValueDictionary()

    def describe(self) -> dict[str, Described]:
        """Return the shape and dtype of each tensor, by name; reads none of them."""
        return self.described

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of its own on the CPU; tied names get one, as long as it is in use."""
        place = self.places[name]
        tensor = self._used.get(place)
        if tensor is None:
            with _naming(self.path):
                tensor = self._used[place] = self.reader.read(place)
        return tensor

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        with _naming(self.path):
            self.reader.read_into(self.places[name], tensor)

    def content(self, names: Collection[str]) -> Weights:
        """Return what the file has under these names, in main memory."""
        extra = {name: self.extra[name] for name in names if name in self.extra}
        tensors = {name: self.read(name) for name in names if name not in extra}
        return Weights(tensors, extra, self.versions, self.frozen)

    def replaced(self, state: Mapping[str, Any]) -> OpenWeights:
        """Return weights with these entries in place of the file's, which are in memory."""
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return replace(
            self,
            reader=InMemory(tensors),
            places={name: name for name in tensors},
            described={name: (tuple(t.shape), t.dtype) for name, t in tensors.items()},
            extra={name: value for name, value in state.items() if name not in tensors},
        )

    def without_prefix(self, prefix: str) -> OpenWeights:
        """Return the same weights under names without what all of them begin with."""
        # A submodule's name has no dot at its end; the wrapper itself has no place here.
        inside = {n: v for n, v in self.versions.items() if f"{n}.".startswith(prefix)}
        return replace(self, versions=inside).renamed(lambda name: name.removeprefix(prefix))

    def renamed(self, new_name: Callable[[str], str]) -> OpenWeights:
        """Return the same weights under other names.

        Args:
            new_name: a function that returns a name's new one; names of submodules end in a dot.
        """

        def renamed(mapping: Mapping[str, Any]) -> dict[str, Any]:
            return {new_name(name): value for name, value in mapping.items()}

        versions = {new_name(f"{name}."): version for name, version in self.versions.items()}
        return replace(
            self,
            places=renamed(self.places),
            described=renamed(self.described),
            extra=renamed(self.extra),
            versions={name[:-1]: version for name, version in versions.items()},
            frozen=Frozen(renamed(self.frozen.dtypes), self.frozen.digest),
        )


@contextlib.contextmanager
def open_weights(path: str | os.PathLike[str]) -> Iterator[OpenWeights]:
    """Give the weights in a file, which its format has checked.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigurationError: there is no format of that name.
        CheckpointError: the file can't be read, whatever its format raised.
    """
    name, chosen = os.fspath(path), format_of(path)
    with contextlib.ExitStack() as stack:
        with _naming(name):
            source = stack.enter_context(chosen.open(path))
            if not isinstance(source, OpenWeights):  # of a format that a user has added
                described = source.describe()
                places = {tensor: tensor for tensor in described}
                frozen = getattr(source, "frozen", NOTHING_FROZEN)
                rest = source.extra, source.versions, frozen, source.foreign
                source = OpenWeights(name, source, places, described, *rest)
        yield source


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn what a format raises, which may be anything, into an error that names the file."""
    try:
        yield
    except (FitkitError, FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path} can't be read: its format, {PurePath(path).suffix}, failed "
            f"({type(error).__name__}: {error}). The file is damaged or isn't of that format. Use "
            "another copy."
        ) from error


#: How the names of our HDF5 files end.
SUFFIXES = (".h5", ".hdf5")


class HDF5:
    """The format of `.h5` files: digest, tied tensors stored once, extra state as JSON."""

    holds: tuple[str, ...] = ("extra", "frozen")

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write a file with nothing but `weights`."""
        numbering = Numbering()
        places = numbering.add_all(weights.tensors)
        content = {
            "kind": "weights",
            "software": software(),
            "weights": encode_weights(weights, places, encode_extra(weights.extra, numbering)),
        }
        write_container(path, content, numbering.arrays)

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[OpenWeights]:
        """Give the weights in a checked file."""
        with read_container(path) as reader:
            yield weights_in(os.fspath(path), reader)


def software() -> dict[str, str]:
    """Return the versions of the software that writes a file, for its readers."""
    return {
        "fitkit": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def encode_extra(extra: Mapping[str, Any], numbering: Numbering) -> dict[str, Any]:
    """Return a state dict's entries that aren't tensors, as JSON by name.

    Raises:
        ConfigurationError: something in them can't be written to a file.
    """
    encoded: dict[str, Any] = encode_state(dict(extra), numbering, "state_dict")["dict"]
    return encoded


def decode_extra(encoded: object, read: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """Return what `encode_extra` was given; ValueError where it can't be."""
    found: dict[str, Any] = decode_state({"dict": encoded}, read)
    return found


def encode_weights(
    weights: Weights, places: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of a document that describes weights.

    Args:
        places: where each tensor is, by name.
        extra: what `encode_extra` made of the other entries.
    """
    return {
        "tensors": dict(places),
        "extra": dict(extra),
        "versions": dict(weights.versions),
        **({"frozen": weights.frozen.as_data()} if weights.frozen.dtypes else {}),
    }


class StoredFile(TensorReader, Protocol):
    """An open and checked file or folder of fitkit's: its document, and tensors by place."""

    @property
    def document(self) -> dict[str, Any]:
        """What it holds, in plain data that name places."""

    @property
    def digest(self) -> str:
        """The digest of all of it, in hexadecimal digits."""

    def place_of(self, number: int) -> Any:
        """Return the place of what a state gives a number; ValueError where there is none."""

    def has(self, place: object) -> bool:
        """Whether there is such a place."""

    def describe(self, place: Any) -> Described:
        """Return the shape and dtype of what is at a place; reads nothing."""


class FolderInThreads(Protocol):
    """A folder that each rank's thread writes its part of, while the training goes on."""

    def write(self, then: Callable[[], None]) -> None:
        """Write this rank's part. Rank 0 also finishes the folder once all parts are there.

        Args:
            then: called on rank 0 when the folder has its name.

        Raises:
            CheckpointError: a part can't be written, or `stop` came first.
        """

    def stop(self) -> None:
        """Let rank 0's thread stop waiting, because a part won't come."""


class FolderFormat(Protocol):
    """A format of checkpoints that all ranks write: folders, to which each writes its part.

    Ranks:
        `save` and `begin` are collective. The other methods are called by one rank.
    """

    def save(
        self,
        path: str | os.PathLike[str],
        state_dict: Mapping[str, Any],
        state: dict[str, Any] | None,
        collectives: Collectives,
    ) -> None:
        """Write a folder, completely or not at all.

        Args:
            path: the folder, which all ranks see. An existing checkpoint is replaced.
            state_dict: the module's state dict. Parameters may be sharded over the ranks (torch's
                `DTensor`). For other tensors, rank 0's are used.
            state: everything else, as for `save_checkpoint`; None for weights only.
            collectives: the ranks.

        Raises:
            ConfigurationError, ArgumentTypeError: something can't be written to a file.
            CheckpointError: a rank can't write; what was at `path` is still there.
        """

    def begin(
        self,
        path: str,
        state_dict: Mapping[str, Any],
        state: dict[str, Any] | None,
        collectives: Collectives,
        copied: Callable[[Any], Any],
    ) -> FolderInThreads:
        """Plan what `save` would write, and copy it, for threads.

        Args:
            path, state_dict, state, collectives: as for `save`.
            copied: copies tensors in dicts and lists to main memory.
        """

    def open_stored(self, path: str | os.PathLike[str]) -> AbstractContextManager[StoredFile]:
        """Open a folder after checking all of it."""

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a folder, of which nobody sees a half."""

    def link(self, path: str | os.PathLike[str], twin: str | os.PathLike[str]) -> None:
        """Give a folder a second name, replacing what has it."""


FOLDERS: Registry[FolderFormat] = Registry("suffix")

INDEX = "index.h5"
"""The file that marks a folder as a checkpoint of fitkit's. It is written last."""


def is_folder_name(path: object) -> bool:
    """Whether a path asks for a folder that all ranks write."""
    return isinstance(path, (str, os.PathLike)) and PurePath(path).suffix.lower() in FOLDERS


def folder_format(path: str | os.PathLike[str]) -> FolderFormat:
    """Return the format of a folder, by the end of its name."""
    return FOLDERS[PurePath(path).suffix.lower()]


def weights_in(path: str, arrays: StoredFile) -> OpenWeights:
    """Return the weights in an open file or folder of fitkit's.

    Raises:
        CheckpointError: it has none, or they aren't as fitkit writes them.
    """
    part = arrays.document.get("weights")
    if not isinstance(part, dict):
        raise CheckpointError(
            f"{path} has no weights in it: it holds {arrays.document.get('kind')!r}. "
            "Give the path of a file of weights or of a checkpoint."
        )
    with refusals(path):
        encoded, versions, places = (
            _mapping(part, key) for key in ("extra", "versions", "tensors")
        )
        frozen = Frozen.from_data(part.get("frozen"))
        if not all(type(version) is int for version in versions.values()):
            raise ValueError("its versions aren't numbers")
        if not all(map(arrays.has, places.values())):
            raise ValueError("it names tensors that it doesn't have")
        if encoded.keys() & places.keys():
            raise ValueError("one name stands for a tensor and for other data")
        extra = decode_extra(encoded, lambda number: arrays.read(arrays.place_of(number)))
    described = {name: arrays.describe(place) for name, place in places.items()}
    found = OpenWeights(path, arrays, places, described, extra, versions, frozen)
    if "state" in arrays.document:
        found.beside = partial(state_in, path, arrays)
    return found


def state_in(path: str, arrays: StoredFile) -> dict[str, Any]:
    """Return what a checkpoint has beside its weights.

    Raises:
        CheckpointError: it isn't as fitkit writes it.
    """
    with refusals(path):
        state = decode_state(
            arrays.document.get("state"), lambda number: arrays.read(arrays.place_of(number))
        )
        if type(state) is not dict:
            raise ValueError("its state isn't a dict")
    return state


def _mapping(part: dict[str, Any], key: str) -> dict[str, Any]:
    value = part.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"the part {key!r} of its weights isn't as fitkit writes it")
    return value


FORMATS.add(SUFFIXES[0], HDF5(), *SUFFIXES[1:])
FORMATS.promise("fitkit.extras.safetensors_file:SAFETENSORS", ".safetensors")
FORMATS.promise("fitkit.extras.torch_file:TORCH", ".pt", ".pth")
FORMATS.promise("fitkit.extras.torch_file:LIGHTNING", ".ckpt")
FORMATS.promise("fitkit.extras.dcp.sharded_folder:DCP", ".dcp")
FOLDERS.promise("fitkit.extras.dcp.sharded_folder:DCP", ".dcp")
