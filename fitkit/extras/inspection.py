"""What is in a file of weights or a checkpoint, as lines and tables for people."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fitkit.arguments import describe, dtype_name
from fitkit.errors import ConfigurationError
from fitkit.extras import urls
from fitkit.seams.files import (
    FORMAT_VERSION,
    SUFFIXES,
    OpenWeights,
    StoredFile,
    checkpoint_in,
    format_of,
    is_folder_name,
    is_url,
    open_stored,
    open_weights,
    refusals,
    save_checkpoint,
    save_weights,
    weights_in,
)
from fitkit.tensors import human_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.tree import Tree


# More than these of one list or dict are counted.
_SHOWN = 12
_MOST_LEVELS = 6


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
    from rich.tree import Tree

    name = os.fspath(path)
    if not holds_checkpoints(path):
        with open_weights(path) as source:
            size = _size_of(name)
            facts = {"kind": f"weights ({PurePath(path).suffix})", "size": size}
            told = {str(key): describe(fact) for key, fact in source.facts.items()}
            yield _heading(name, {**facts, **told})
            yield from _weights(source)
        return
    with open_stored(path) as stored:
        document = stored.document
        versions = document.get("software")
        facts = {
            "kind": str(document.get("kind")),
            "size": _size_of(name),
            "format": f"version {FORMAT_VERSION}",
            **(versions if isinstance(versions, dict) else {}),
            "digest": stored.digest,
        }
        yield _heading(name, {key: str(fact) for key, fact in facts.items()})
        if "weights" in document:
            yield from _weights(weights_in(name, stored))
        if "state" in document:
            tree = Tree("state")
            with refusals(name):
                _grow(tree, document["state"], stored, 0)
            yield tree


def _size_of(path: str) -> str:
    """Return the size of a file, or of a folder and its files."""
    if is_url(path):
        return human_bytes(urls.size(path))
    if not is_folder_name(path):
        return human_bytes(os.path.getsize(path))
    sizes = [entry.stat().st_size for entry in os.scandir(path) if entry.is_file()]
    return f"{human_bytes(sum(sizes))} in {len(sizes)} files"


def clean(text: str) -> str:
    """Text from a file without what a terminal would obey."""
    return text if text.isprintable() else repr(text)


def _heading(name: str, facts: Mapping[str, str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_row("file", Text(name, "bold"))
    for key, value in facts.items():
        table.add_row(Text(clean(key)), Text(clean(value)))
    return table


def _weights(source: OpenWeights) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    found = source.describe()
    table = Table("weights", "shape", "dtype", "size")
    table.columns[3].justify = "right"
    numbers = total = 0
    for name, (shape, dtype) in found.items():
        count = math.prod(shape)
        numbers, total = numbers + count, total + count * dtype.itemsize
        table.add_row(
            Text(clean(name)), str(shape), dtype_name(dtype), human_bytes(count * dtype.itemsize)
        )
    for name, value in source.extra.items():
        table.add_row(Text(clean(name)), "", "extra state", Text(describe(value)))
    yield table
    yield Text(f"{len(found)} tensors, {numbers:,} numbers, {human_bytes(total)}")
    if source.frozen.dtypes:
        left_out = f"without {len(source.frozen.dtypes)} frozen parameters, whose digest is "
        yield Text(left_out + clean(source.frozen.digest))


def _grow(tree: Tree, encoded: object, stored: StoredFile, level: int) -> None:
    from rich.text import Text

    items = _items(encoded)
    for index, (key, item) in enumerate(items):
        if index == _SHOWN:
            tree.add(f"… and {len(items) - _SHOWN} more")
            return
        branch = tree.add(Text(f"{clean(key)}: {_words(item, stored)}"))
        if level < _MOST_LEVELS and not _is_short(item):
            _grow(branch, item, stored, level + 1)


def _items(encoded: object) -> list[tuple[str, object]]:
    """Return the keys and values of what is encoded, where it has any."""
    if isinstance(encoded, list):
        return [(str(index), item) for index, item in enumerate(encoded)]
    if not isinstance(encoded, dict) or len(encoded) != 1:
        return []
    ((kind, part),) = encoded.items()
    if kind == "dict" and isinstance(part, dict):
        return list(part.items())
    if kind in ("items", "Counter") and isinstance(part, list):
        pairs = [pair for pair in part if isinstance(pair, list) and len(pair) == 2]
        return [(_plain(key), item) for key, item in pairs]
    return _items(part) if kind in ("tuple", "set") else []


def _is_short(encoded: object) -> bool:
    """Whether it is shown on one line: a value, or a few of them."""
    items = _items(encoded)
    return all(not _items(item) for _, item in items) and (
        isinstance(encoded, list) or (isinstance(encoded, dict) and "tuple" in encoded)
    )


def _words(encoded: object, stored: StoredFile) -> str:
    """One line for a part of the state."""
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((kind, part),) = encoded.items()
        is_numbered = kind in ("tensor", "array", "scalar") and type(part) is int
        if is_numbered:
            shape, dtype = stored.describe(stored.place_of(part))
            return f"{kind} {dtype_name(dtype)} {shape}"
    items = _items(encoded)
    if not items:
        return _plain(encoded)
    if not _is_short(encoded):
        return f"{len(items)} entries" if len(items) > 1 else "1 entry"
    shown = ", ".join(_words(item, stored) for _, item in items[:_SHOWN])
    return f"[{shown}]" if len(items) <= _SHOWN else f"[{shown}, … {len(items)} in all]"


def _plain(encoded: object) -> str:
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((kind, part),) = encoded.items()
        return f"{kind} {describe(part)}" if part else f"empty {kind}"
    return describe(encoded)


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
    format_of(target)  # refused before the source is read
    format_of(source)
    if os.path.realpath(source) == os.path.realpath(target):
        raise ConfigurationError(
            f"{os.fspath(source)} can't be converted into itself. Give the target another name."
        )
    if not (holds_checkpoints(target) and holds_checkpoints(source)):
        with open_weights(source) as weights:
            save_weights(target, _state_dict(weights))
        return "weights"
    name = os.fspath(source)
    with open_stored(source) as stored:
        if stored.document.get("kind") == "weights":
            save_weights(target, _state_dict(weights_in(name, stored)))
            return "weights"
        found = checkpoint_in(name, stored)
        save_checkpoint(target, _state_dict(found.weights), found.state)
        return "checkpoint"


def holds_checkpoints(path: str | os.PathLike[str]) -> bool:
    return is_folder_name(path) or PurePath(path).suffix.lower() in SUFFIXES


def _state_dict(source: OpenWeights) -> Mapping[str, Any]:
    return source.content([*source.describe(), *source.extra]).state_dict()
