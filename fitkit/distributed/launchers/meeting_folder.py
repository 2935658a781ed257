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

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    FileStore,
    PrefixStore,
    Store,
)

from fitkit.distributed.launchers.address_file import private_folder, process_name
from fitkit.distributed.launchers.watch import longest_pause
from fitkit.errors import ConfigurationError, WorkerError

if sys.platform != "win32":
    import fcntl

NEW_S = 60.0
"""A folder of that age is locked by its owner, or has none."""
LOST_S = 30.0
"""How long torch looks for a store's file where that has been removed."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01
"""Between two looks for a key; many ranks pause longer."""


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
        """A new one, to be removed by this process.

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
                f"The ranks can't meet by files in {parent} ({str(error).splitlines()[0]}). Set "
                "TMPDIR to a folder on a disk of this machine that has room."
            ) from error
        return made

    def store(self, call: int) -> Store:
        """The store of a call, or 0 for that of all calls."""
        store = FileStore(str(self.path / str(call)), -1)
        store.set_timeout(timedelta(seconds=LOST_S))
        return store

    def next_store(self) -> Store:
        """The store of the next call, where each process counts its calls.

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


def meets_by_files(store: Store | None) -> bool:
    """Whether a store, or what it is a part of, is a file of this machine."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)


class PromptStore(Store):
    """A store for gloo: it sees a key soon, and `break_off` ends its waits from another thread.

    Torch's waits can't be ended (and warn on the terminal where they end in vain), and its file
    store looks for a missing key only every 10 ms. Its maker keeps it as long as the process
    group: torch doesn't.

    Args:
        store: where the ranks meet.
        ranks: that wait there.
    """

    def __init__(self, store: Store, ranks: int) -> None:
        super().__init__()
        self._store = store
        self._shortest_pause_s = longest_pause(ranks, 1, SHORTEST_PAUSE_S * 10) / 10
        self._longest_pause_s = longest_pause(ranks, 1, LONGEST_PAUSE_S)
        self._broken_off = False
        self._seen: set[str] = set()

    def break_off(self) -> None:
        """End the wait that is under way, and those to come."""
        self._broken_off = True

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        if key not in self._seen:  # gloo waits for a key, and then gets it: one look is enough
            self.wait([key])
        return self._store.get(key)

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._store.compare_set(key, expected, value)

    def delete_key(self, key: str) -> bool:
        self._seen.discard(key)
        return self._store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        end, pause_s = time.monotonic() + seconds, self._shortest_pause_s
        while not self._store.check(keys):
            if self._broken_off:
                raise DistStoreError(f"the wait was broken off, keys: {', '.join(keys)}")
            if time.monotonic() > end:
                raise DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, self._longest_pause_s)
        self._seen.update(keys)
