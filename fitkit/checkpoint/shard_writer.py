"""One rank's part of a folder, planned by `torch.distributed.checkpoint`.

Torch's own `save` leaves a pickle (`.metadata`) in the folder, and has the ranks exchange pickles
that nobody checks. Here the ranks exchange torch's plans as all else that they tell each other, and
write the files that its `HuggingFaceStorageReader` reads: `.safetensors` with the chunks' places in
the header.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from fitkit.checkpoint.codec import Numbering
from fitkit.checkpoint.dtypes import storable
from fitkit.checkpoint.formats import Weights
from fitkit.checkpoint.safetensors_file import write_tensors
from fitkit.checkpoint.shards import SHARDING
from fitkit.distributed.collectives import Collectives, together
from fitkit.errors import CheckpointError, FitkitError

Result = TypeVar("Result")


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
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def planned() -> SavePlan:
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        return planner.create_local_plan()

    def written() -> dict[str, str]:
        # Every rank comes to the same plan for all.
        everyones, _ = planner.create_global_plan(plans)
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        digest = _write(place / file, planner.finish_plan(everyones[rank]), planner)
        return {} if digest is None else {file: digest}

    def done(work: Callable[[], Result]) -> Result:
        try:
            return work()
        except FitkitError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path} can't be written: rank {rank} failed ({type(error).__name__}: {error}). "
                "Nothing was changed."
            ) from error

    plans = collectives.gather(together(collectives, lambda: done(planned)))
    found = collectives.gather(together(collectives, lambda: done(written)))
    digests = {file: digest for of_rank in found for file, digest in of_rank.items()}
    together(collectives, lambda: done(lambda: finish(digests)) if rank == 0 else None)


def _write(path: Path, plan: SavePlan, planner: DefaultSavePlanner) -> str | None:
    """Write a rank's chunks; empty ones are left out. The file's digest; None without a file."""
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
    if not tensors:
        return None
    info = {key: {"saved_offsets": begin} for key, begin in offsets.items()}
    texts = {SHARDING: json.dumps(info), "DCP_VERSION": "1.0"}
    return write_tensors(path, Weights(tensors, {}, {}), texts)
