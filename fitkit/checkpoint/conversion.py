"""The same weights or training in another file format."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import PurePath
from typing import Any

from fitkit.checkpoint.container import read_container
from fitkit.checkpoint.formats import Weights, WeightSource, format_of
from fitkit.checkpoint.hdf5 import SUFFIXES
from fitkit.checkpoint.sharded_folder import is_folder_name
from fitkit.checkpoint.shards import read_index
from fitkit.checkpoint.whole import open_checkpoint, save_checkpoint
from fitkit.errors import ConfigurationError


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
        to.write(target, _weights(weights))
    return "weights"


def _holds_checkpoints(path: str | os.PathLike[str]) -> bool:
    return is_folder_name(path) or PurePath(path).suffix.lower() in SUFFIXES


def _is_checkpoint(path: str | os.PathLike[str]) -> bool:
    with contextlib.ExitStack() as stack:
        opened = read_index(path, stack) if is_folder_name(path) else None
        reader = opened or stack.enter_context(read_container(path))
        return reader.document.get("kind") != "weights"


def _weights(source: WeightSource) -> Weights:
    tensors = {name: source.read(name) for name in source.describe()}
    return Weights(tensors, source.extra, source.versions)


def _state_dict(source: WeightSource) -> OrderedDict[str, Any]:
    found = _weights(source)
    state: OrderedDict[str, Any] = OrderedDict({**found.tensors, **found.extra})
    metadata = {name: {"version": version} for name, version in found.versions.items()}
    state._metadata = metadata  # type: ignore[attr-defined]
    return state
