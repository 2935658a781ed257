"""Waiting for keys of a store that all ranks can reach, without too many requests to it."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    FileStore,
    PrefixStore,
    Store,
)

REQUESTS_PER_S = 10_000
"""So often all ranks together ask a store while they wait: a fifth of what a core can answer."""
SHORTEST_PAUSE_S = 0.0002
"""Between a wait's first two looks."""
GLOO_PAUSE_S = 0.01
"""The longest pause between two looks for what gloo waits for."""


def longest_pause(ranks: int, requests: int, least_s: float) -> float:
    """How long to pause between two looks at a store which all ranks look at, in seconds.

    Args:
        ranks: that look.
        requests: of each look.
        least_s: what few ranks pause.
    """
    return max(least_s, requests * ranks / REQUESTS_PER_S)


class Patience:
    """How long a wait may last, on the monotonic clock, and its pauses, each longer than the last.

    Args:
        timeout_s: that long.
        longest_s: the longest pause, of few ranks.
        ranks: that wait so at the same store.
        requests: of each look.
    """

    def __init__(
        self, timeout_s: float, longest_s: float = 0.1, ranks: int = 1, requests: int = 1
    ) -> None:
        self.timeout_s = timeout_s
        self.longest_s: float = longest_pause(ranks, requests, longest_s)
        self._shortest_s = longest_pause(ranks, requests, SHORTEST_PAUSE_S * 10) / 10
        self._end = time.monotonic() + timeout_s
        self.begin()

    def begin(self) -> None:
        """Something that may come at once is awaited: short pauses first."""
        self._pause_s = self._shortest_s

    def remains(self) -> bool:
        """Pause a little, longer each time; whether there is time for another look."""
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.2, self.longest_s)
        return time.monotonic() < self._end

    @property
    def overdrawn_s(self) -> float:
        """How long ago the wait should have ended; negative before."""
        return time.monotonic() - self._end

    def end(self) -> None:
        """No more looks: the caller has left."""
        self._end = 0.0


def meets_by_files(store: Store | None) -> bool:
    """Whether a store, or what it is a part of, is a file of this machine."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)


class PromptStore(Store):
    """A store for gloo: it sees a key soon, and `end_waits` ends its waits from another thread.

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
        self._ranks = ranks
        self._ends_waits = False
        self._seen: set[str] = set()

    def wait_for_all(self) -> None:
        """Wait until every rank has called this."""
        if self.add("came", 1) == self._ranks:
            self.set("all came", "")
        self.wait(["all came"])

    def end_waits(self) -> None:
        """End the wait that is under way, and those to come."""
        self._ends_waits = True

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
        patience = Patience(seconds, GLOO_PAUSE_S, self._ranks)
        while not self._store.check(keys):
            if self._ends_waits:
                raise DistStoreError(f"the wait was interrupted, keys: {', '.join(keys)}")
            if not patience.remains():
                raise DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")
        self._seen.update(keys)
