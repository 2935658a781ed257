"""A folder that threads write during training."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fitkit.errors import CheckpointError
from fitkit.extras.dcp.sharded_folder import Content, plan_shards, spread_alone, write_shard
from fitkit.extras.dcp.unfinished_folder import SHARD, UnfinishedFolder
from fitkit.seams.checkpoints import INDEX, write_container
from fitkit.seams.files import refuse_url, replacing
from fitkit.seams.strategies import Collectives, done_by_rank_zero, together

_LOOK_EVERY_S = 0.02
GRACE_S = 10.0
"""How long rank 0 waits for other ranks' parts when its interpreter ends."""


class FolderByThreads:
    """A `.dcp` folder that threads write during training. Each rank's thread calls `write`.

    The save is planned and its tensors are copied before, because the training then needs the
    collective exchanges. Each thread leaves its shard's digest as a note in the unfinished folder.
    Rank 0's thread waits for the notes, writes the index and gives the folder its name.

    Args:
        path, state_dict, state, collectives: as for `save_folder`.
        copied: copies tensors in dicts and lists to main memory.

    Ranks:
        Collective.

    Raises:
        ConfigurationError, ArgumentTypeError, CheckpointError: as `save_folder`.
    """

    def __init__(
        self,
        path: str,
        state_dict: Mapping[str, Any],
        state: dict[str, Any] | None,
        collectives: Collectives,
        copied: Callable[[Any], Any],
    ) -> None:
        refuse_url(path, "a folder of shards", "Write a name that ends in .h5.")
        self._path = path
        self._rank, self._size = collectives.rank, collectives.world_size
        self._stops = threading.Event()
        content = together(collectives, lambda: Content(state_dict, state))
        tensors = content.tensors(collectives.broadcast(content.ties))
        leads = self._rank == 0
        self._folder: UnfinishedFolder | None = None

        def begin() -> Path:
            self._folder = UnfinishedFolder(path)
            return self._folder.place

        self._place = done_by_rank_zero(collectives, begin)
        try:
            shard = plan_shards(path, tensors if leads else spread_alone(tensors), collectives)
            self._document, arrays = content.index(tensors) if leads else ({}, [])
            parts, self._arrays = copied((dict(shard.tensors), list(arrays)))
            self._shard = shard._replace(tensors=parts)
        except BaseException:
            self.discard()
            raise

    def write(self, then: Callable[[], None]) -> None:
        """Write this rank's part. Rank 0 also finishes the folder once all parts are there.

        Args:
            then: called on rank 0 when the folder has its name.

        Raises:
            CheckpointError: a part can't be written, or `stop` came first.
        """
        try:
            digests = write_shard(self._path, self._place, self._shard, self._rank)
            if self._folder is None:
                with replacing(self._note_of(self._rank)) as file:
                    file.write(json.dumps(digests).encode("ascii"))
                return
            for rank in range(1, self._size):
                digests |= self._digests_of(rank)
            document = {**self._document, "files": digests}
            write_container(self._place / INDEX, document, self._arrays)
            self._folder.finish()
        except BaseException:
            self.discard()
            raise
        then()

    def stop(self) -> None:
        """Let rank 0's thread stop waiting, because a part won't come."""
        self._stops.set()

    def discard(self) -> None:
        """Remove the folder, where it hasn't got its name."""
        if self._folder is not None:
            self._folder.discard()

    def _note_of(self, rank: int) -> Path:
        return Path(self._place) / f".rank-{rank:05d}"

    def _digests_of(self, rank: int) -> dict[str, str]:
        """Return a rank's file and its digest once it is written; empty if the rank has nothing."""
        note, ends_at = self._note_of(rank), float("inf")
        while not note.is_file():
            # The interpreter ends: whoever would call `stop` has gone.
            if not threading.main_thread().is_alive():
                ends_at = min(ends_at, time.monotonic() + GRACE_S)
            if self._stops.wait(_LOOK_EVERY_S) or time.monotonic() > ends_at:
                raise CheckpointError(
                    f"{self._path} wasn't written: the part of rank {rank} never came. Nothing was "
                    "changed."
                )
        try:
            found = json.loads(note.read_bytes())
        except (OSError, ValueError):
            found = None
        is_ours = isinstance(found, dict) and all(
            SHARD.fullmatch(name) and isinstance(digest, str) for name, digest in found.items()
        )
        if not is_ours:
            raise CheckpointError(
                f"{self._path} wasn't written: somebody has changed the note {note} of rank "
                f"{rank}. Choose a folder that nobody else may write to."
            )
        os.unlink(note)
        return dict(found)
