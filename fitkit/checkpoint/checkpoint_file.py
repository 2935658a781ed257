"""The root of all that a run saves and loads: whole checkpoints.

A checkpoint is a file of weights with a `state` beside them, so `load_weights` reads it too.
`save_checkpoint` goes `weights.py` and `codec.py` (what there is, as JSON and numbered arrays) →
`container.py` (one HDF5 file) → `arrays.py`, `header.py` (numbers, digest), in a file of
`atomic.py`. `open_checkpoint` goes the other way. For a folder that many ranks write, a
`FolderFormat` stands in the container's place.

Only what is checked is handed out, so a caller can read and compare everything before anything is
changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fitkit.arguments import describe
from fitkit.checkpoint.arrays import Numbering
from fitkit.checkpoint.codec import encode_state
from fitkit.checkpoint.container import read_container, write_container
from fitkit.checkpoint.formats import (
    FOLDERS,
    FORMATS,
    SUFFIXES,
    OpenWeights,
    StoredFile,
    encode_extra,
    encode_weights,
    folder_format,
    is_folder_name,
    software,
    state_in,
    weights_in,
)
from fitkit.checkpoint.weights import collect_weights
from fitkit.distributed.collectives import Solo
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError

_CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, all of which is checked.

    Attributes:
        path: the file, as it was given.
        weights: its weights; `fitting_weights` compares them with a module. They are read from
            the file while it is open.
        state: what `save_checkpoint` was given, with all tensors on the CPU, in memory of their
            own.
        software: the versions of fitkit and torch that wrote it, as text.
    """

    path: str
    weights: OpenWeights
    state: dict[str, Any]
    software: Mapping[str, str]


def save_checkpoint(
    path: str | os.PathLike[str], state_dict: Mapping[str, Any], state: dict[str, Any]
) -> None:
    """Write weights and the state of a run to one file, whole or not at all.

    Args:
        path: the file; its name ends in `.h5` or `.hdf5`. An existing one is replaced. A name
            that ends in `.dcp` asks for a folder, which this process alone writes.
        state_dict: what `module.state_dict()` returned, as in `save_weights`.
        state: all else, of the kinds that `encode_state` lists. Tensors that share all of their
            memory, with each other or with weights, are written once.

    Raises:
        ArgumentTypeError: `state_dict` or `state` isn't a dict.
        ConfigurationError: something can't be written to a file; the message names its place.
        CheckpointError: the file can't be written; what was at `path` is still there.
    """
    _check_suffix(path, *SUFFIXES, *FOLDERS)
    if type(state) is not dict:
        raise ArgumentTypeError(f"state={describe(state)} must be a dict.")
    if is_folder_name(path):
        folder_format(path).save(path, state_dict, state, Solo())
        return
    numbering, weights = Numbering(), collect_weights(state_dict)
    places = numbering.add_all(weights.tensors)
    content = {
        "kind": _CHECKPOINT,
        "software": software(),
        "weights": encode_weights(weights, places, encode_extra(weights.extra, numbering)),
        "state": encode_state(state, numbering),
    }
    write_container(path, content, numbering.arrays)


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """Open a checkpoint after checking all of it; nothing is changed by that.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigurationError: the file's name doesn't end as a checkpoint's.
        CheckpointError: the file is damaged, is none of fitkit's, or isn't a checkpoint.
    """
    with open_stored(path) as stored:
        yield checkpoint_in(os.fspath(path), stored)


def open_stored(path: str | os.PathLike[str]) -> AbstractContextManager[StoredFile]:
    """Return a file or folder in fitkit's own form, whatever it holds, once all of it is checked.

    Raises:
        FileNotFoundError, ConfigurationError, CheckpointError: as `open_checkpoint`.
    """
    _check_suffix(path, *SUFFIXES, *FOLDERS)
    is_folder = is_folder_name(path)
    return folder_format(path).open_stored(path) if is_folder else read_container(path)


def checkpoint_in(name: str, stored: StoredFile) -> Checkpoint:
    """Return the checkpoint in an open file or folder.

    Raises:
        CheckpointError: it holds something else.
    """
    kind = stored.document.get("kind")
    if kind == "weights":
        raise CheckpointError(
            f"{name} has weights only; use load_weights. Only save() writes the optimizer and "
            "the progress that a checkpoint needs.",
            code="FK054",
        )
    if kind != _CHECKPOINT:
        raise CheckpointError(
            f"{name} holds {str(kind)[:40]!r}, not {_CHECKPOINT!r}. Give the path of another file."
        )
    state = state_in(name, stored)
    found = stored.document.get("software")
    items = found.items() if isinstance(found, dict) else ()
    software = {key: value for key, value in items if isinstance(value, str)}
    return Checkpoint(name, weights_in(name, stored), state, software)


def _check_suffix(path: str | os.PathLike[str], *accepted: str) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path={describe(path)} must be a string or a path.")
    suffix = PurePath(path).suffix.lower()
    if suffix in accepted:
        return
    hint = (
        f"A file that ends in {suffix!r} holds weights alone; use save_weights and load_weights."
        if suffix in FORMATS
        else f"Write {PurePath(path).with_suffix(SUFFIXES[0]).name!r}, for example."
    )
    raise ConfigurationError(
        f"{os.fspath(path)!r} can't be a checkpoint: the names of checkpoints end in "
        f"{', '.join(accepted[:-1])} or {accepted[-1]}. {hint}"
    )
