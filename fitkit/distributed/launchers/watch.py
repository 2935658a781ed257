"""How ranks tell each other why an exchange broke: through a store, beside their work.

A rank that fails leaves the process group, and every other rank then gets an error about its
connection. What the user needs is the first rank's own error. So a failing rank writes it down
before it leaves, and the others read it there. Where nobody wrote anything, the ranks that are
left find out who is missing, and where it is.

All this is done by a thread with a connection of its own, because calls into a store can't be
interrupted: the rank's main thread waits for that thread, and not longer than it wants to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from fitkit.distributed.stores import longest_pause
from fitkit.errors import WorkerError, with_code
from fitkit.printing import say

PERIOD_S = 0.5
"""Between two looks while all is well."""
SHORT_PERIOD_S = 0.05
"""Between two looks while the cause of a failure is sought."""
REPORT_S = 10.0
"""How long a rank tries to write down its failure before it leaves; a busy machine may be slow."""
SILENCE_S = 3.0
"""How long a rank waits for the word of one that failed."""
ANSWER_S = 1.5
"""How long a rank may take to say where it is."""
END_EXCHANGES_AFTER_S = 3.0
"""How long after another's failure a rank may stay in an exchange before that is ended."""
LAST_RESORT_S = 30.0
"""How long after another's failure a rank may stay in the call before its process is ended."""
SHOWN = 8
"""Of so many ranks at most it is said where they were."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """What happened to a rank.

    Attributes:
        rank: which.
        what: a sentence.
        text: its traceback, its stack or its last words.
        raised: whether it is an exception, whose traceback the rank prints itself.
    """

    rank: int
    what: str
    text: str = ""
    raised: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return that of an exception on a rank; a `WorkerError` tells of another's itself."""
        if isinstance(error, WorkerError):
            return cls(error.rank, str(error), error.remote_traceback)
        line = "".join(traceback.format_exception_only(error)).strip()
        return cls(
            rank, f"Rank {rank} failed: {line}", "".join(traceback.format_exception(error)), True
        )

    @classmethod
    def first(cls, store: Store) -> Failure | None:
        """Return the one that was written down first; None where none was."""
        return cls(*json.loads(store.get("failed"))) if store.check(["failed"]) else None

    def write(self, store: Store) -> Failure:
        """Write it down for the other ranks, where none was; the first one."""
        text = json.dumps(dataclasses.astuple(self))
        return Failure(*json.loads(store.compare_set("failed", "", text)))

    def as_error(self, before: str = "") -> WorkerError:
        """Return the error that tells of it, on another rank.

        Args:
            before: what its message begins with.
        """
        label = "Its traceback:\n" if self.raised else ""
        text = "" if self.text in self.what else f"\n\n{label}{self.text}"
        return WorkerError(f"{before}{self.what}{text}", self.rank, self.text)


class Watch:
    """Watches the other ranks during a call.

    Args:
        store: this call's own part of a store.
        rank, size: this process's rank and the number of ranks.
        lost: a function that returns the failure of a rank that has ended, if known here.
        end_exchanges: a function that ends this process's exchanges.
        ends_process: whether this process may be ended if it doesn't return from the call.

    Attributes:
        failure: the first failure, as far as known here.
        exchanges_ended: whether this process's exchanges have been ended.
        began: the start on the monotonic clock.
        elsewhere: the other ranks' exchanges that failed, too, without a failure found by `cause`:
            the reason and the place, by rank. Only the first one and a few others are kept.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        lost: Callable[[], Failure | None],
        end_exchanges: Callable[[], None],
        ends_process: bool = True,
    ) -> None:
        self.failure: Failure | None = None
        self.exchanges_ended: bool = False
        self._store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._lost = lost
        self._end_exchanges = end_exchanges
        self._ends_process = ends_process
        self._caller = threading.get_ident()
        self._local: Failure | None = None
        self.elsewhere: dict[int, tuple[str, str]] = {}
        self.began: float = time.monotonic()
        self._error = self._place = ""  # of an exchange that broke here
        self._error_at = self._failure_at = 0.0
        self._asked = self._answered = False
        self._reported, self._explained = threading.Event(), threading.Event()
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fitkit-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._wake.set()
        self._thread.join(REPORT_S)

    # ------------------------------------------------------------------ for the caller

    def report(self, failure: Failure) -> Failure:
        """Write down this rank's failure for the others; the first of all, as far as known."""
        self._local = failure
        self._wake.set()
        self._reported.wait(REPORT_S)
        return self.failure or failure

    def cause(self, error: BaseException) -> Failure | None:
        """Why an exchange broke; None where all ranks are there and none knows."""
        self._place = "".join(traceback.format_exception(error))
        self._error = first_line(error)
        self._wake.set()
        self._explained.wait(SILENCE_S + ANSWER_S + REPORT_S)
        return self.failure

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while not self._over.is_set():
            seeks = bool(self._error or self._local)
            least_s, requests = SHORT_PERIOD_S if seeks else PERIOD_S, 2
            self._wake.wait(longest_pause(len(self._others) + 1, requests, least_s))
            self._wake.clear()
            try:
                self._check_store()
            except DistError:
                self._found(
                    Failure(
                        0, "The store that the ranks share is gone, and so is the process that "
                           "serves it (rank 0 or the launcher)."
                    )
                )  # fmt: skip
            if self.failure is not None and self._local is None and not self._over.is_set():
                self._end_call(self.failure)

    def _check_store(self) -> None:
        if self._local is not None and not self._reported.is_set():
            self._found(self._local.write(self._store))
        failure = self.failure or Failure.first(self._store)
        if failure is None and (failure := self._lost()) is not None:
            failure = failure.write(self._store)
        if failure is not None:
            self._found(failure)
        if not self._answered and self._store.check(["where"]):
            self._store.set(f"stack/{self._rank}", self._stack())
            self._answered = True
        if self._error and self.failure is None and not self._explained.is_set():
            self._find_missing()

    def _found(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure, self._failure_at = failure, time.monotonic()
        self._reported.set()
        self._explained.set()

    def _find_missing(self) -> None:
        """Nobody has said anything yet: after a while, see who is missing."""
        now = time.monotonic()
        if not self._error_at:
            self._error_at = now
            self._store.set(f"broke/{self._rank}", json.dumps([self._error, self._place]))
            self._store.compare_set("broke first", "", str(self._rank))
        elif not self._asked and now - self._error_at > SILENCE_S:
            self._store.set("where", "")
            self._asked = True
        elif self._asked and now - self._error_at > SILENCE_S + ANSWER_S:
            missing = self._silent(self._others)
            if missing:
                self._found(self._missing(missing))
            first = int(self._store.get("broke first"))
            others = sorted(set(self._others).difference(missing), key=lambda r: (r != first, r))
            for rank in others[:SHOWN]:
                error, place = json.loads(self._store.get(f"broke/{rank}"))
                self.elsewhere[rank] = error, place
            self._explained.set()

    def _silent(self, ranks: list[int]) -> list[int]:
        """Those of the ranks that haven't said that an exchange broke there.

        All ranks ask this at once: few requests find a few among many.
        """
        if not ranks or self._store.check([f"broke/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        middle = len(ranks) // 2
        return [*self._silent(ranks[:middle]), *self._silent(ranks[middle:])]

    def _missing(self, ranks: list[int]) -> Failure:
        """Return the failure of ranks that neither failed nor saw an exchange fail."""
        stacks = {
            rank: self._store.get(f"stack/{rank}").decode()
            for rank in ranks[:SHOWN]
            if self._store.check([f"stack/{rank}"])
        }
        silent = [rank for rank in ranks[:SHOWN] if rank not in stacks]
        if silent:
            return Failure(
                silent[0],
                f"Rank {silent[0]} doesn't answer and gave no reason: it has ended, its process "
                f"is stopped, or its machine is out of reach ({self._error}).",
            )
        places = "\n".join(f"Rank {rank} is here:\n{stack}" for rank, stack in stacks.items())
        what = f"Rank {ranks[0]} did not take part in an exchange in time ({self._error})."
        return Failure(ranks[0], with_code(what, "FK042"), places)

    def _end_call(self, failure: Failure) -> None:
        """Another rank has failed: this one must come out of the call."""
        waited = time.monotonic() - self._failure_at
        if waited > END_EXCHANGES_AFTER_S and not self.exchanges_ended and not self._error:
            self.exchanges_ended = True
            with contextlib.suppress(Exception):
                self._end_exchanges()
        if waited > LAST_RESORT_S and self._ends_process:
            # Python can't raise in a thread that waits in C++, and nobody will answer it.
            message = (
                f"fitkit: stopped rank {self._rank}, because another rank failed. {failure.what}"
            )
            say(f"{message}\n{failure.text}", stream="stderr")
            os._exit(1)

    def _stack(self) -> str:
        frame: Any = sys._current_frames().get(self._caller)
        return "".join(traceback.format_stack(frame)) if frame else "nowhere: its thread has ended"


def broken_exchange(rank: int, error: BaseException, watch: Watch) -> Failure:
    """Return the failure of ranks whose exchange broke although none of them failed.

    Args:
        rank: of this process.
        error: that of the exchange, here.
        watch: has looked for a cause.
    """
    local = first_line(error)
    lines = [local, *(line for line, _ in watch.elsewhere.values())]
    places = {rank: "".join(traceback.format_exception(error))}
    places.update((other, place) for other, (_, place) in watch.elsewhere.items())
    if any(re.search("timed? ?out", line, re.IGNORECASE) for line in lines):
        what = (
            "The ranks waited for each other in different exchanges until the strategy's timeout "
            f"({local}). One of them makes a call that the others don't, for example under `if "
            "model.is_global_zero:`, or is too slow, or its machine is out of reach."
        )
    else:
        what = (
            f"The connection between ranks was closed although no rank failed: {local}, after "
            f"{time.monotonic() - watch.began:.0f} s of this call. Another program, a firewall or "
            "the network may have closed it. Start the call again; resume_from continues from a "
            "checkpoint."
        )
    waited = (f"Rank {number} waited here:\n{place}" for number, place in sorted(places.items()))
    return Failure(max(places), what, "\n".join(waited))


BROKEN_EXCHANGE = (
    "connection closed by peer", "connection reset", "connection refused", "broken pipe",
    "timed out waiting", "socket timeout", "gloo", "nccl", "wait timeout", "tcpstore",
    "failed to connect", "connection was likely closed",
)  # fmt: skip


def shows_broken_exchange(error: BaseException) -> bool:
    """Whether an error only shows that an exchange with another rank broke."""
    if isinstance(error, OSError):
        return False  # torch's are none: a file, or a connection of the user's own
    seen: BaseException | None = error
    while seen is not None:
        about_ranks = any(part in str(seen).lower() for part in BROKEN_EXCHANGE)
        if isinstance(seen, DistError):
            return True
        if about_ranks and isinstance(seen, RuntimeError | OSError):
            return True
        seen = seen.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return what torch says, without the place in its C++ source."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).rstrip(".")
