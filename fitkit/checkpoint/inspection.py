"""What is in a file of weights or a checkpoint, as lines and tables for people."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fitkit.arguments import describe
from fitkit.checkpoint.arrays import dtype_name
from fitkit.checkpoint.container import Reader, read_container
from fitkit.checkpoint.formats import SUFFIXES, HDF5Weights, Weights, WeightSource, format_of
from fitkit.checkpoint.header import FORMAT_VERSION
from fitkit.checkpoint.sharded_folder import is_folder_name, opened_folder
from fitkit.checkpoint.shards import FolderWeights, Numbers, read_index
from fitkit.checkpoint.whole import open_checkpoint, save_checkpoint
from fitkit.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.tree import Tree


# More than these of one list or dict are counted.
_SHOWN = 12
_MOST_LEVELS = 6


class Numbered(Protocol):
    """Tensors by the numbers that a state gives them."""

    def __len__(self) -> int:
        """How many there are."""

    def describe(self, number: int) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of one."""


def print_inspection(path: str | os.PathLike[str], console: Console) -> None:
    """Print what a file or a folder holds: its kind, versions, weights and, abbreviated, its state.

    All of the file is checked first, as when it is loaded; no array is read.

    Raises:
        FileNotFoundError, CheckpointError, ConfigurationError: as `load_weights`.
    """
    # Complete before anything is printed: a refusal is one line and nothing else.
    for part in list(_parts(path)):
        console.print(part)


def _parts(path: str | os.PathLike[str]) -> Iterator[RenderableType]:
    name = os.fspath(path)
    if is_folder_name(path):
        yield from _folder(name)
        return
    size = _size(os.path.getsize(path))
    if PurePath(path).suffix.lower() in SUFFIXES:
        with read_container(path) as reader:
            yield from _container(name, size, reader)
        return
    with format_of(path).open(path) as source:
        yield _heading(name, {"kind": f"weights ({PurePath(path).suffix})", "size": size})
        yield from _weights(source)


def _folder(name: str) -> Iterator[RenderableType]:
    with opened_folder(name) as (reader, shards):
        total = sum(entry.stat().st_size for entry in os.scandir(name) if entry.is_file())
        yield _heading(name, _facts(reader, f"{_size(total)} in {len(shards.files) + 1} files"))
        yield from _weights(FolderWeights(name, reader, shards))
        if "state" in reader.document:
            yield _state(reader.document["state"], Numbers(name, reader, shards))


def _container(name: str, size: str, reader: Reader) -> Iterator[RenderableType]:
    document = reader.document
    yield _heading(name, _facts(reader, size))
    if "weights" in document:
        yield from _weights(HDF5Weights(name, reader))
    if "state" in document:
        yield _state(document["state"], reader)


def _facts(reader: Reader, size: str) -> dict[str, str]:
    document = reader.document
    software = document.get("software")
    if not isinstance(software, dict):
        software = {}
    return {
        "kind": str(document.get("kind")),
        "size": size,
        "format": f"version {FORMAT_VERSION}",
        **{key: str(item) for key, item in software.items()},
        "digest": reader.digest,
    }


def _clean(text: str) -> str:
    """Text from a file without what a terminal would obey."""
    return text if text.isprintable() else repr(text)


def _heading(name: str, facts: Mapping[str, str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_row("file", Text(name, "bold"))
    for key, value in facts.items():
        table.add_row(Text(_clean(key)), Text(_clean(value)))
    return table


def _weights(source: WeightSource) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    found = source.describe()
    table = Table("weights", "shape", "dtype", "size")
    table.columns[3].justify = "right"
    numbers = total = 0
    for name, (shape, dtype) in found.items():
        count = 1
        for length in shape:
            count *= length
        numbers, total = numbers + count, total + count * dtype.itemsize
        table.add_row(
            Text(_clean(name)), str(shape), dtype_name(dtype), _size(count * dtype.itemsize)
        )
    for name, value in source.extra.items():
        table.add_row(Text(_clean(name)), "", "extra state", Text(describe(value)))
    yield table
    yield Text(f"{len(found)} tensors, {numbers:,} numbers, {_size(total)}")


def _state(encoded: object, reader: Numbered) -> Tree:
    from rich.tree import Tree

    tree = Tree("state")
    _grow(tree, encoded, reader, 0)
    return tree


def _grow(tree: Tree, encoded: object, reader: Numbered, level: int) -> None:
    from rich.text import Text

    items = _items(encoded)
    for index, (key, item) in enumerate(items):
        if index == _SHOWN:
            tree.add(f"… and {len(items) - _SHOWN} more")
            return
        branch = tree.add(Text(f"{_clean(key)}: {_words(item, reader)}"))
        if level < _MOST_LEVELS and not _is_short(item):
            _grow(branch, item, reader, level + 1)


def _items(encoded: object) -> list[tuple[str, object]]:
    """The keys and values of what is encoded, where it has any."""
    if isinstance(encoded, list):
        return [(str(index), item) for index, item in enumerate(encoded)]
    if not isinstance(encoded, dict) or len(encoded) != 1:
        return []
    ((kind, part),) = encoded.items()
    if kind == "dict" and isinstance(part, dict):
        return list(part.items())
    if kind in ("deque", "defaultdict") and isinstance(part, list) and len(part) == 2:
        kind, part = ("items" if kind == "defaultdict" else "tuple"), part[1]
    if kind in ("items", "Counter") and isinstance(part, list):
        return [(_plain(pair[0]), pair[1]) for pair in part if _is_pair(pair)]
    return _items(part) if kind in ("tuple", "set", "frozenset") else []


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_short(encoded: object) -> bool:
    """Whether it is shown on one line: a value, or a few of them."""
    items = _items(encoded)
    return all(not _items(item) for _, item in items) and (
        isinstance(encoded, list) or (isinstance(encoded, dict) and "tuple" in encoded)
    )


def _words(encoded: object, reader: Numbered) -> str:
    """One line for a part of the state."""
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((kind, part),) = encoded.items()
        number = part[1] if kind == "array" and _is_pair(part) else part
        if kind in ("tensor", "array") and type(number) is int and 0 <= number < len(reader):
            shape, dtype = reader.describe(number)
            return f"{kind} {dtype_name(dtype)} {shape}"
    items = _items(encoded)
    if not items:
        return _plain(encoded)
    if not _is_short(encoded):
        return f"{len(items)} entries" if len(items) > 1 else "1 entry"
    shown = ", ".join(_words(item, reader) for _, item in items[:_SHOWN])
    return f"[{shown}]" if len(items) <= _SHOWN else f"[{shown}, … {len(items)} in all]"


def _plain(encoded: object) -> str:
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((kind, part),) = encoded.items()
        return f"{kind} {describe(part)}" if part else f"empty {kind}"
    return describe(encoded)


def _size(size_bytes: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.1f} {unit}" if unit != "B" else f"{size_bytes} B"
        size_bytes /= 1000  # type: ignore[assignment]
    return f"{size_bytes:.2f} GB"


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> str:
    """Write what a file or a folder holds in the format that another name asks for.

    A checkpoint becomes a checkpoint where the other format has them (`.h5`, `.hdf5`, `.dcp`),
    and else its weights. Numbers are read where they lie in the file; only tensors of several
    chunks, and those of a training's state, are put together in main memory, once.

    Args:
        source: a checkpoint or weights, in any format that fitkit reads.
        target: what to write; it is replaced, whole or not at all.

    Returns:
        `"checkpoint"` or `"weights"`: what was written.

    Raises:
        FileNotFoundError: there is no such source.
        ConfigurationError: a name without a known ending, twice the same path, or something that
            the other format can't hold.
        CheckpointError: the source is damaged, or the target can't be written.
    """
    to, read = format_of(target), format_of(source)
    if os.path.realpath(source) == os.path.realpath(target):
        raise ConfigurationError(
            f"{os.fspath(source)} can't be converted into itself. Give the target another name."
        )
    if _holds_checkpoints(target) and _holds_checkpoints(source) and _is_checkpoint(source):
        with open_checkpoint(source) as found:
            save_checkpoint(target, _state_dict(found.weights), found.state)
        return "checkpoint"
    with read.open(source) as weights:
        to.write(target, _weights_to_convert(weights))
    return "weights"


def _holds_checkpoints(path: str | os.PathLike[str]) -> bool:
    return is_folder_name(path) or PurePath(path).suffix.lower() in SUFFIXES


def _is_checkpoint(path: str | os.PathLike[str]) -> bool:
    with contextlib.ExitStack() as stack:
        opened = read_index(path, stack) if is_folder_name(path) else None
        reader = opened or stack.enter_context(read_container(path))
        return reader.document.get("kind") != "weights"


def _weights_to_convert(source: WeightSource) -> Weights:
    tensors = {name: source.read(name) for name in source.describe()}
    return Weights(tensors, source.extra, source.versions)


def _state_dict(source: WeightSource) -> OrderedDict[str, Any]:
    found = _weights_to_convert(source)
    state: OrderedDict[str, Any] = OrderedDict({**found.tensors, **found.extra})
    metadata = {name: {"version": version} for name, version in found.versions.items()}
    state._metadata = metadata  # type: ignore[attr-defined]
    return state
