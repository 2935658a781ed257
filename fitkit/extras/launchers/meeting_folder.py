"""Where the ranks that one process starts meet: files that no other user can reach.

A TCPStore would listen at a port. Anyone who connects to it could read and replace all messages by
which the ranks find each other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.launchers.private_folder import private_folder, process_name

if sys.platform != "win32":
    import fcntl

NEW_S = 60.0
"""A folder of that age is locked by its owner, or has none."""
LOST_S = 30.0
"""How long torch looks for a store's file where that has been removed."""


class MeetingFolder:
    """A folder of this user's with a store for each call.

    Args:
        path: of a folder that `make` has made, in this process or another.

    Attributes:
        calls: how many have begun, of those that `next_store` counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: int = 0
        self._lock: IO[str] | None = None

    @classmethod
    def make(cls) -> MeetingFolder:
        """Return a new one, to be removed by this process.

        Raises:
            ConfigurationError: files can't be locked there.
        """
        parent = private_folder()
        _remove_abandoned(parent)
        made = cls(parent / f"ranks-{process_name(os.getpid())}-{secrets.token_hex(8)}")
        made.path.mkdir(mode=0o700)
        try:
            made._lock = (made.path / "lock").open("w")
            if sys.platform != "win32":
                fcntl.flock(made._lock, fcntl.LOCK_EX)
            made.store(0).set("made", "")
        except (OSError, RuntimeError) as error:
            made.remove()
            raise ConfigurationError(
                f"The ranks can't exchange files in {parent} ({str(error).splitlines()[0]}). Set "
                "TMPDIR to a folder on a local disk with free space."
            ) from error
        return made

    def store(self, call: int) -> Store:
        """Return the store of a call, or 0 for that of all calls."""
        store = FileStore(str(self.path / str(call)), -1)
        store.set_timeout(timedelta(seconds=LOST_S))
        return store

    def next_store(self) -> Store:
        """Return the store of the next call, where each process counts its calls.

        Raises:
            WorkerError: the folder has gone with the process that made it.
        """
        self.calls += 1
        if self._lock is not None and self.calls > 2:
            # All ranks have come to the call before this one, so they have left the one before
            # that; in the store of the last call they may still read what rank 0 has done since.
            (self.path / str(self.calls - 2)).unlink(missing_ok=True)
        if not self.path.is_dir():
            raise WorkerError("Rank 0's process has ended.")
        return self.store(self.calls)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes that were killed have left there: nobody holds its lock."""
    if sys.platform == "win32":
        return
    for folder in parent.glob("ranks-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > NEW_S:
                with (folder / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
