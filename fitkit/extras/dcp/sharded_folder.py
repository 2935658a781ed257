"""A checkpoint as a folder to which every rank writes its own part: `.dcp`.

```
shard-00001-model-00001-of-00001.safetensors …   each rank's chunks
index.h5        the document, as in other checkpoints, and all tensors that aren't spread
```

Each shard says which chunks of which tensors it has, and the index has the digests of the shards,
so that a folder is one save's or is refused. Chunks are put together in any other way when they are
read. Nothing is pickled.

`torch.distributed.checkpoint` plans who writes what, and its `HuggingFaceStorageReader` reads the
chunks as well. Its `save` isn't used: that leaves a pickle (`.metadata`) in the folder, and has the
ranks exchange pickles that nobody checks. Nor is its `HuggingFaceStorageWriter`, which writes to a
path, even if it has become another user's link, and has no digest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from fitkit.errors import CheckpointError, FitkitError
from fitkit.extras.dcp.unfinished_folder import SHARD, UnfinishedFolder, link, remove
from fitkit.extras.safetensors_file import (
    SafeTensorsFile,
    has_dtype,
    open_tensors,
    write_tensors,
)
from fitkit.seams.checkpoints import (
    INDEX,
    Described,
    FolderInThreads,
    Numbering,
    Reader,
    collect_weights,
    describe_tensor,
    encode_extra,
    encode_state,
    encode_weights,
    is_shape,
    read_container,
    read_description,
    software,
    write_container,
)
from fitkit.seams.files import (
    OpenWeights,
    StoredFile,
    Weights,
    damaged,
    refusals,
    refuse_url,
    storable,
    weights_in,
)
from fitkit.seams.strategies import Collectives, Solo, done_by_rank_zero, is_spread, together

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

STATE_KEY = "fitkit.state."
"""What the names of the state's spread tensors begin with."""

SHARDING = "DCP_SHARDING_INFO"
"""The text in a shard that says where its chunks begin, by torch's name for it."""

_MOST_CUT = 4
"""A mesh of ranks has one or two dimensions, and so many of a tensor's are cut."""

Result = TypeVar("Result")


class ShardedFolder:
    """The format of `.dcp` folders of weights."""

    holds: tuple[str, ...] = ("extra", "frozen")

    def write(self, path: str | os.PathLike[str], weights: Weights) -> None:
        """Write a folder with nothing but `weights`."""
        save_folder(path, weights.state_dict(), None, Solo())

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[OpenWeights]:
        """Give the weights in a checked folder."""
        with open_folder(path) as folder:
            yield weights_in(os.fspath(path), folder)

    def save(
        self,
        path: str | os.PathLike[str],
        state_dict: Mapping[str, Any],
        state: dict[str, Any] | None,
        collectives: Collectives,
    ) -> None:
        """Write a checkpoint to which every rank writes its part, completely or not at all."""
        save_folder(path, state_dict, state, collectives)

    def begin(
        self,
        path: str,
        state_dict: Mapping[str, Any],
        state: dict[str, Any] | None,
        collectives: Collectives,
        copied: Callable[[Any], Any],
    ) -> FolderInThreads:
        """Plan a folder that threads write."""
        from fitkit.extras.dcp.folder_by_threads import FolderByThreads

        return FolderByThreads(path, state_dict, state, collectives, copied)

    def open_stored(self, path: str | os.PathLike[str]) -> AbstractContextManager[StoredFile]:
        """Open a folder after checking all of it."""
        return open_folder(path)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a folder, of which nobody sees a half."""
        remove(path)

    def link(self, path: str | os.PathLike[str], twin: str | os.PathLike[str]) -> None:
        """Give a folder a second name, replacing what has it."""
        link(path, twin)


# ---------------------------------------------------------------------- writing


def save_folder(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    state: dict[str, Any] | None,
    collectives: Collectives,
) -> None:
    """Write a checkpoint to which every rank writes its part, completely or not at all.

    Args:
        path: the folder, which all ranks see. An existing checkpoint is replaced.
        state_dict: the module's state dict. Parameters may be sharded over the ranks (torch's
            `DTensor`). For other tensors, rank 0's are used.
        state: everything else, as for `save_checkpoint`; None for weights only.
        collectives: the ranks.

    Ranks:
        Collective.

    Raises:
        ConfigurationError, ArgumentTypeError: something can't be written to a file.
        CheckpointError: a rank can't write; what was at `path` is still there.
    """
    refuse_url(path, "a folder of shards", "Write a name that ends in .h5.")
    leads = collectives.rank == 0
    content = together(collectives, lambda: Content(state_dict, state))
    tensors = content.tensors(collectives.broadcast(content.ties))
    made: list[UnfinishedFolder] = []

    def begin() -> Path:
        made.append(UnfinishedFolder(path))
        return made[0].place

    def write_index(files: dict[str, str]) -> None:
        document, arrays = content.index(tensors)
        write_container(place / INDEX, {**document, "files": files}, arrays)

    place = done_by_rank_zero(collectives, begin)
    try:
        write_shards(
            os.fspath(path),
            place,
            tensors if leads else spread_alone(tensors),
            collectives,
            write_index,
        )
        together(collectives, lambda: made[0].finish() if leads else None)
    except BaseException:
        for folder in made:
            folder.discard()
        raise


def spread_alone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what other ranks than the first write: of what isn't spread, they have the same."""
    return {key: tensor for key, tensor in tensors.items() if is_spread(tensor)}


class Content:
    """What goes into a folder: the document, and the tensors by their names in it.

    Attributes:
        ties: names of spread weights, with the name that each one's numbers are stored under.
    """

    def __init__(self, state_dict: Mapping[str, Any], state: dict[str, Any] | None) -> None:
        self._numbering = FolderNumbering()
        spread = {name: value for name, value in state_dict.items() if is_spread(value)}
        ordinary = OrderedDict((n, v) for n, v in state_dict.items() if n not in spread)
        metadata = getattr(state_dict, "_metadata", {})
        ordinary._metadata = metadata  # type: ignore[attr-defined]
        self._weights = collect_weights(ordinary)
        self._names = [name for name in state_dict if name not in self._weights.extra]
        self._spread = {name: value.detach() for name, value in spread.items()}
        self._extra = encode_extra(self._weights.extra, self._numbering)
        self._state = None if state is None else encode_state(state, self._numbering)
        self.ties: dict[str, str] = _ties(self._spread)

    def tensors(self, ties: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the tensors that go into shards, by their names there.

        Args:
            ties: rank 0's, which a rank whose parts are empty can't know.
        """
        self.ties = dict(ties)
        found = {name: t for name, t in self._spread.items() if ties.get(name) == name}
        seen = Numbering()
        first: dict[int, str] = {}
        for name, tensor in self._weights.tensors.items():
            if has_dtype(tensor):
                self.ties[name] = first.setdefault(seen.add(tensor), name)
                found[self.ties[name]] = tensor
        return {**found, **self._numbering.spread}

    def index(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], list[Any]]:
        """Return the document without the files' digests, and the arrays that aren't in shards."""
        places = {
            name: self.ties[name]
            if name in self.ties
            else self._numbering.array(self._weights.tensors[name])
            for name in self._names
        }
        content: dict[str, Any] = {
            "kind": "weights" if self._state is None else "checkpoint",
            "software": software(),
            "weights": encode_weights(self._weights, places, self._extra),
            "numbers": self._numbering.places,
            "files": {},
            "shards": {key: describe_tensor(tensor) for key, tensor in tensors.items()},
        }
        if self._state is not None:
            content["state"] = self._state
        return content, self._numbering.arrays


class FolderNumbering(Numbering):
    """Numbers for a state's tensors; spread ones go to the shards under a name.

    Attributes:
        places: for each number, the array's in the index, or the name in the shards.
        spread: the spread tensors by these names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int | str] = []
        self.spread: dict[str, torch.Tensor] = {}
        self._known: dict[int, int] = {}

    def array(self, value: object) -> int:
        """Return the number of an array in the index."""
        return super().add(value)

    def add(self, value: object) -> int:
        if isinstance(value, torch.Tensor) and is_spread(value):
            key = f"{STATE_KEY}{len(self.spread)}"
            self.spread[key] = value.detach()
            self.places.append(key)
            return len(self.places) - 1
        array = self.array(value)
        if array not in self._known:
            self._known[array] = len(self.places)
            self.places.append(array)
        return self._known[array]


def _ties(spread: Mapping[str, Any]) -> dict[str, str]:
    """For each spread tensor the first name of the same numbers: tied ones are stored once."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in spread.items():
        part = tensor.to_local()
        memory = part.untyped_storage().data_ptr(), part.storage_offset(), tuple(tensor.shape)
        ties[name] = first.setdefault(memory, name) if part.numel() else name
    return ties


def write_shards(
    path: str,
    place: Path,
    tensors: dict[str, torch.Tensor],
    collectives: Collectives,
    finish: Callable[[dict[str, str]], None],
) -> None:
    """Write this rank's chunks of spread tensors; of what several ranks have, one writes it.

    Args:
        path: what the folder is called in messages.
        place: the folder.
        tensors: those that are spread, on every rank; ordinary ones on rank 0 alone.
        collectives: the ranks.
        finish: called on rank 0 with all files' digests by their names, when all are written.

    Ranks:
        Collective.

    Raises:
        FitkitError: a rank can't write; raised on all.
    """
    rank = collectives.rank
    shard = plan_shards(path, tensors, collectives)
    found = collectives.gather(together(collectives, lambda: write_shard(path, place, shard, rank)))
    digests = {file: digest for of_rank in found for file, digest in of_rank.items()}
    together(
        collectives,
        lambda: _named(path, rank, lambda: finish(digests)) if rank == 0 else None,
    )


class Shard(NamedTuple):
    """A rank's file: the chunks in it, which is none without any, and the texts in its header."""

    file: str
    tensors: dict[str, torch.Tensor]
    texts: dict[str, str]


def plan_shards(path: str, tensors: dict[str, torch.Tensor], collectives: Collectives) -> Shard:
    """Agree on who writes what; the arguments are those of `write_shards`.

    Ranks:
        Collective.

    Raises:
        FitkitError: a rank can't; raised on all.
    """
    # It imports much of torch.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    rank = collectives.rank
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def planned() -> SavePlan:
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        return planner.create_local_plan()

    def resolved() -> Shard:
        # Every rank comes to the same plan for all.
        everyones, _ = planner.create_global_plan(plans)
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        return Shard(file, *_chunks(planner.finish_plan(everyones[rank]), planner))

    plans = collectives.gather(together(collectives, lambda: _named(path, rank, planned)))
    return together(collectives, lambda: _named(path, rank, resolved))


def write_shard(path: str, place: Path, shard: Shard, rank: int) -> dict[str, str]:
    """Write a rank's file; its digest by its name, and nothing where it has no chunks."""
    if not shard.tensors:
        return {}
    weights = Weights(shard.tensors, {}, {})
    write = partial(write_tensors, place / shard.file, weights, shard.texts)
    return {shard.file: _named(path, rank, write)}


def _named(path: str, rank: int, work: Callable[[], Result]) -> Result:
    """Return what `work` gives; an error of any kind becomes one with the folder's name."""
    try:
        return work()
    except FitkitError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} can't be written: rank {rank} failed ({type(error).__name__}: {error}). "
            "Nothing was changed."
        ) from error


def _chunks(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a rank's chunks, of which empty ones are left out, and the texts that say where they
    lie.
    """
    tensors: dict[str, torch.Tensor] = {}
    offsets: dict[str, list[int]] = {}
    known = Numbering()
    for item in plan.items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
        if tensor.numel():
            key = item.index.fqn
            if key in tensors:
                raise CheckpointError(
                    f"{key} lies in several pieces on one rank, of which a shard can hold one. "
                    "Save to a file that ends in .h5."
                )
            count = len(known.arrays)
            if known.add(tensor) < count:
                tensor = tensor.clone()  # one chunk under two names is refused when it is read
            tensors[key] = storable(tensor)
            offsets[key] = list(item.tensor_data.chunk.offsets)
    info = {key: {"saved_offsets": begin} for key, begin in offsets.items()}
    return tensors, {SHARDING: json.dumps(info), "DCP_VERSION": "1.0"}


# ---------------------------------------------------------------------- reading


@contextlib.contextmanager
def open_folder(path: str | os.PathLike[str]) -> Iterator[Folder]:
    """Open a folder after checking all of it.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it isn't a folder of fitkit's, or something in it is damaged or missing.
    """
    refuse_url(path, "a folder of shards", "Write a name that ends in .h5.")
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
    with contextlib.ExitStack() as stack:
        yield Folder(folder, stack.enter_context(read_container(folder / INDEX)), stack)


class Chunk(NamedTuple):
    """A part of a tensor: the file that has it, where it belongs, its shape and dtype."""

    file: str
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Folder:
    """An open folder: its document, and tensors by their places.

    A place is the number of an array in the index, or the name of a tensor in the shards.

    Args:
        folder: where it is.
        index: its index, open.
        stack: keeps the shards open.

    Attributes:
        document: the index's.
        digest: the index's, which has those of the shards.
        files: the shards, with their digests.

    Raises:
        CheckpointError: a shard is missing, damaged or another save's, or the document isn't as
            fitkit writes it.
    """

    def __init__(self, folder: Path, index: Reader, stack: contextlib.ExitStack) -> None:
        name = str(folder)
        self.document: dict[str, Any] = index.document
        self.digest: str = index.digest
        self._index = index
        with refusals(name):
            self.files: dict[str, Any] = _dict(self.document.get("files"))
            for file, digest in self.files.items():
                if not SHARD.fullmatch(file) or not isinstance(digest, str):
                    raise ValueError("it names files that fitkit never writes")
            described = _dict(self.document.get("shards"))
        self._shards: dict[str, SafeTensorsFile] = {}
        for file, digest in self.files.items():
            if not (folder / file).is_file():
                raise damaged(name, f"{file} is missing")
            shard = stack.enter_context(open_tensors(folder / file))
            if shard.digest != digest:
                raise damaged(name, f"{file} belongs to another save")
            self._shards[file] = shard
        with refusals(name):
            self._chunks: dict[str, list[Chunk]] = {key: [] for key in described}
            for file, shard in self._shards.items():
                self._note_chunks(file, shard)
            self._spread = {
                key: _checked_whole(key, entry, self._chunks[key])
                for key, entry in described.items()
            }
            numbers = self.document.get("numbers")
            if not isinstance(numbers, list) or not all(map(self.has, numbers)):
                raise ValueError("it doesn't say where its tensors are")
            if len(set(numbers)) < len(numbers):  # each would be read into memory of its own
                raise ValueError("two numbers stand for the same tensor")
            self._numbers = numbers

    def _note_chunks(self, name: str, shard: SafeTensorsFile) -> None:
        """Add a shard's chunks to those of the tensors that they are of."""
        if shard.aliases:  # each name would be read into memory of its own
            raise ValueError(f"{name} has one chunk under several names")
        try:
            places = _dict(json.loads(shard.metadata.get(SHARDING, "")))
        except (ValueError, RecursionError):
            raise ValueError(f"{name} doesn't say where its chunks are") from None
        for key, (sizes, dtype) in shard.described.items():
            begin = _dict(places.get(key)).get("saved_offsets")
            if key not in self._chunks or not is_shape(begin) or len(begin) != len(sizes):
                raise ValueError(f"{name} doesn't say where its chunk of {key!r} is")
            self._chunks[key].append(Chunk(name, tuple(begin), sizes, dtype))

    def place_of(self, number: int) -> int | str:
        """Return the place of what a state gives a number; ValueError where there is none."""
        if not 0 <= number < len(self._numbers):
            raise ValueError("its state names tensors that it doesn't have")
        place: int | str = self._numbers[number]
        return place

    def has(self, place: object) -> bool:
        """Whether there is such a place."""
        return place in self._spread if isinstance(place, str) else self._index.has(place)

    def describe(self, place: Any) -> Described:
        """Return the shape and dtype of what is at a place."""
        return self._spread[place] if isinstance(place, str) else self._index.describe(place)

    def read(self, place: Any) -> torch.Tensor:
        """Return what is at a place, as a tensor of its own on the CPU."""
        if not isinstance(place, str):
            return self._index.read(place)
        shape, dtype = self._spread[place]
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into(place, tensor)
        return tensor

    def read_into(self, place: Any, tensor: torch.Tensor) -> None:
        """Copy what is at a place into a tensor of its shape and dtype."""
        if not isinstance(place, str):
            self._index.read_into(place, tensor)
            return
        for chunk in self._chunks[place]:
            ends = map(sum, zip(chunk.begin, chunk.sizes, strict=True))
            target = tensor.detach()[tuple(map(slice, chunk.begin, ends))]
            self._shards[chunk.file].read_into(place, target)


def _checked_whole(key: str, entry: object, chunks: list[Chunk]) -> Described:
    """Return the shape and dtype of a tensor; ValueError where its chunks aren't its whole."""
    shape, dtype = read_description(entry, repr(key))
    alike = all(chunk.dtype == dtype and len(chunk.sizes) == len(shape) for chunk in chunks)
    if not alike or not _make_up(shape, chunks):
        raise ValueError(f"the chunks of {key!r} don't make it up")
    return shape, dtype


def _make_up(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Whether chunks fill a shape: no gap, no number twice, none outside.

    Corners tell, counted with the sign of a difference along each dimension: those of chunks side
    by side cancel, and the whole's remain. Dimensions that no chunk cuts needn't be looked at.
    """
    cut = [d for d, size in enumerate(shape) if any(chunk.sizes[d] != size for chunk in chunks)]
    if len(cut) > _MOST_CUT or any(
        chunk.begin[d] for chunk in chunks for d in range(len(shape)) if d not in cut
    ):
        return False
    if math.prod(shape) == 0:
        return all(math.prod(chunk.sizes) == 0 for chunk in chunks)
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(chunk.begin, chunk.sizes, 1) for chunk in chunks]
    for begin, sizes, weight in (*boxes, ((0,) * len(shape), shape, -1)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            place = tuple(begin[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
            corners[place] += weight * (-1) ** sum(ends)
    return not any(corners.values())


def _dict(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("its index isn't as fitkit writes it")
    return found


DCP = ShardedFolder()
