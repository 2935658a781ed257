"""One rank's part of a folder, written for `torch.distributed.checkpoint`.

Torch's own writer leaves a pickle (`.metadata`) in the folder. This one writes the files that its
`HuggingFaceStorageReader` reads, of `.safetensors` with the chunks' places in the header, and
tells its caller what is in them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fitkit.checkpoint.dtypes import storable
from fitkit.checkpoint.formats import Weights
from fitkit.checkpoint.safetensors_file import write_tensors
from fitkit.checkpoint.shards import SHARDING
from fitkit.errors import CheckpointError, FitkitError


def write_shards(
    path: str,
    place: Path,
    tensors: dict[str, torch.Tensor],
    rank: int,
    ranks: int,
    finish: Callable[[dict[str, str]], None],
) -> None:
    """Write this rank's chunks of spread tensors; of what several ranks have, one writes it.

    Args:
        path: what the folder is called in messages.
        place: the folder.
        tensors: those that are spread, on every rank; ordinary ones on rank 0 alone.
        rank, ranks: this one, and how many there are.
        finish: called on rank 0 with all files' digests by their names, when all are written.

    Ranks:
        Collective.

    Raises:
        FitkitError: a rank can't write; raised on all.
    """
    writer = ShardWriter(place, rank, finish)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # With one rank it says that there is no process group.
            warnings.simplefilter("ignore", UserWarning)
            save(tensors, storage_writer=writer, planner=planner, no_dist=ranks == 1)
    except CheckpointException as error:
        failed, (cause, _) = min(error.failures.items())
        if isinstance(cause, (FitkitError, KeyboardInterrupt, SystemExit)):
            raise cause from None
        raise CheckpointError(
            f"{path} can't be written: rank {failed} failed ({type(cause).__name__}: {cause}). "
            "Nothing was changed."
        ) from error


class ShardWriter(StorageWriter):
    """Writes one file for each rank that has something to write."""

    def __init__(self, place: Path, rank: int, finish: Callable[[dict[str, str]], None]) -> None:
        self._place = place
        self._file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        self._finish = finish

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks; empty ones are left out."""
        tensors: dict[str, torch.Tensor] = {}
        offsets: dict[str, list[int]] = {}
        items = {}
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
                tensors[key], items[key] = storable(tensor), item
                offsets[key] = list(item.tensor_data.chunk.offsets)
        results = []
        if tensors:
            info = {key: {"saved_offsets": begin} for key, begin in offsets.items()}
            texts = {SHARDING: json.dumps(info), "DCP_VERSION": "1.0"}
            digest = write_tensors(self._place / self._file, Weights(tensors, {}, {}), texts)
            for key, item in items.items():
                written = (self._file, digest)
                results.append(WriteResult(item.index, tensors[key].nbytes, written))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Tell of all ranks' files, on rank 0."""
        self._finish(dict(result.storage_data for of_rank in results for result in of_rank))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
