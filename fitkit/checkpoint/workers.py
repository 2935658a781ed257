"""Threads for one large task that consists of many pieces, such as the blocks of a file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")

# Memory, not cores, is what limits more threads than these.
_MOST_THREADS = 8
# Below this size starting threads costs more than it saves.
_WORTH_THREADS_BYTES = 8 << 20
# Pieces that a thread has waiting: enough never to be idle, few enough to hold little memory.
_WAITING = 2


class Workers(Generic[Result]):
    """Does pieces of work, in several threads where that is worth it, and keeps their results.

    Args:
        size_bytes: about how much the whole task reads or writes; a small one gets no threads.
    """

    def __init__(self, size_bytes: int) -> None:
        self._results: list[Result | Future[Result]] = []
        self._waiting: deque[Future[Result]] = deque()
        self._threads = min(_cores(), _MOST_THREADS)
        large = size_bytes >= _WORTH_THREADS_BYTES and self._threads > 1
        self._pool = ThreadPoolExecutor(self._threads, "fitkit-file") if large else None

    def __enter__(self) -> Workers[Result]:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def submit(self, work: Callable[[], Result]) -> None:
        """Do a piece soon, in any thread; waits where too many are still to be done.

        Raises:
            Exception: what this piece or one before raised.
        """
        if self._pool is not None:
            try:
                future = self._pool.submit(work)
            except RuntimeError:  # no thread can be started, as while the interpreter ends
                # Those that run finish what waits; this piece may be among it, and is done twice.
                self._pool.shutdown()
                self._pool = None
            else:
                self._results.append(future)
                self._waiting.append(future)
                if len(self._waiting) > _WAITING * self._threads:
                    self._waiting.popleft().result()
                return
        self._results.append(work())

    def results(self) -> list[Result]:
        """What the pieces returned, in the order in which they were submitted, when all are done.

        Raises:
            Exception: what a piece raised.
        """
        return [
            result.result() if isinstance(result, Future) else result for result in self._results
        ]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
