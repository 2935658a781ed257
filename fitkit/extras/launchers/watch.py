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
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from fitkit.errors import WorkerError, with_code
from fitkit.extras.launchers.asking import ANSWER_S, Asking, Report
from fitkit.extras.launchers.stores import longest_pause
from fitkit.printing import say

if TYPE_CHECKING:
    from fitkit.extras.whereabouts import Standing

PERIOD_S = 0.5
"""Between two looks while all is well."""
SHORT_PERIOD_S = 0.05
"""Between two looks while the cause of a failure is sought."""
REPORT_S = 10.0
"""How long a rank tries to write down its failure before it leaves; a busy machine may be slow."""
SILENCE_S = 3.0
"""How long a rank waits for the word of one that failed."""
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
        quiet_s: after how many seconds without a batch the ranks' places are printed; 0 for never.
        sees_waits, is_near: as in `Asking`.

    Attributes:
        failure: the first failure, as far as known here.
        exchanges_ended: whether this process's exchanges have been ended.
        began: the start on the monotonic clock.
        elsewhere: the other ranks' exchanges that failed, too, without a failure found by `cause`:
            the reason and the place, by rank. Only the first one and a few others are kept.
        asking: asks the ranks where they are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        lost: Callable[[], Failure | None],
        end_exchanges: Callable[[], None],
        ends_process: bool = True,
        quiet_s: float = 0.0,
        sees_waits: bool = False,
        is_near: bool = False,
    ) -> None:
        self.failure: Failure | None = None
        self.exchanges_ended: bool = False
        self._store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._lost = lost
        self._end_exchanges = end_exchanges
        self._ends_process = ends_process
        self.asking: Asking = Asking(
            self._store, rank, size, threading.get_ident(), quiet_s, sees_waits, is_near
        )
        self._local: Failure | None = None
        self.elsewhere: dict[int, tuple[str, Standing]] = {}
        self.began: float = time.monotonic()
        self._error = ""  # of an exchange that broke here
        self._error_at = self._failure_at = 0.0
        self._question: int | None = None
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
        from fitkit.extras.whereabouts import standing_at

        self.asking.standing = standing_at(error, self.asking.still)
        self._error = first_line(error)
        self._wake.set()
        self._explained.wait(SILENCE_S + ANSWER_S + REPORT_S)
        return self.failure

    def before(self, ranks: list[int]) -> dict[int, Standing | None]:
        """Return where ranks were when they were asked last before an exchange broke, if ever."""
        return self.asking.answers(self._question - 1, ranks) if self._question else {}

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
        self.asking.answer()
        if self.failure is None and not self._error:
            report = self.asking.look()
            if report is not None and report.never_ends:
                self._found(_never_ends(report).write(self._store))
        if self._error and self.failure is None and not self._explained.is_set():
            self._find_missing()

    def _found(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure, self._failure_at = failure, time.monotonic()
        self._reported.set()
        self._explained.set()

    def _find_missing(self) -> None:
        """Nobody has said anything yet: after a while, see who is missing."""
        now, standing = time.monotonic(), self.asking.standing
        assert standing is not None
        if not self._error_at:
            self._error_at = now
            self._store.set(f"broke/{self._rank}", json.dumps([self._error, standing.as_text()]))
            self._store.compare_set("broke first", "", str(self._rank))
        elif self._question is None and now - self._error_at > SILENCE_S:
            self._question = self.asking.ask()
        elif self._question is not None and now - self._error_at > SILENCE_S + ANSWER_S:
            missing = self._silent(self._others)
            if missing:
                self._found(self._missing(missing, self._question))
            first = int(self._store.get("broke first"))
            others = sorted(set(self._others).difference(missing), key=lambda r: (r != first, r))
            for rank in others[:SHOWN]:
                error, place = json.loads(self._store.get(f"broke/{rank}"))
                self.elsewhere[rank] = error, type(standing).from_text(place)
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

    def _missing(self, ranks: list[int], question: int) -> Failure:
        """Return the failure of ranks that neither failed nor saw an exchange fail."""
        from fitkit.extras.whereabouts import lines

        others = [rank for rank in self._others if rank not in ranks]
        shown = sorted({*ranks[:SHOWN], self._rank, *others[: SHOWN - 1]})
        found = self.asking.answers(question, shown)
        stacks = {rank: one.stack for rank in ranks[:SHOWN] if (one := found[rank]) is not None}
        silent = [rank for rank in ranks[:SHOWN] if rank not in stacks]
        if silent:
            what = (
                f"Rank {silent[0]} doesn't answer and gave no reason: it has ended, its process "
                f"is stopped, or its machine is out of reach ({self._error})."
            )
            return Failure(silent[0], what, lines(found))
        places = "\n".join(f"Rank {rank} is here:\n{stack}" for rank, stack in stacks.items())
        what = f"Rank {ranks[0]} did not take part in an exchange in time ({self._error})."
        return Failure(ranks[0], with_code(what, "FK042"), f"{lines(found)}\n\n{places}")

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


def _never_ends(report: Report) -> Failure:
    """Return the failure of ranks that were seen several times to wait for each other."""
    answers = {rank: one for rank, one in report.found.items() if one is not None}
    what = f"{report.text.removeprefix('fitkit: ')} {_uneven(answers)}"
    return Failure(max(answers), with_code(what, "FK043"), _stacks(answers))


def _uneven(found: Mapping[int, Standing]) -> str:
    """Say what some ranks do that others don't, where they wait in different exchanges."""
    learns = {rank: "in manual_backward\n" in one.stack for rank, one in sorted(found.items())}
    if len({*learns.values()}) == 1:
        return (
            "One of them makes a call that the others don't, for example under "
            "`if model.is_global_zero:`."
        )
    first = next(rank for rank, does in learns.items() if does)
    other = next(rank for rank, does in learns.items() if not does)
    return (
        f"Rank {other} made no backward pass where rank {first} did. Every rank must call "
        "manual_backward equally often, also for a batch that it leaves out: "
        "self.manual_backward(0 * loss) adds nothing."
    )


def _stacks(found: Mapping[int, Standing]) -> str:
    shown = sorted(found.items())[:SHOWN]
    return "\n".join(f"Rank {rank} waited here:\n{one.stack}" for rank, one in shown)


def broken_exchange(rank: int, error: BaseException, watch: Watch) -> Failure:
    """Return the failure of ranks whose exchange broke although none of them failed.

    Args:
        rank: of this process.
        error: that of the exchange, here.
        watch: has looked for a cause.
    """
    from fitkit.extras.whereabouts import lines, same_place

    assert watch.asking.standing is not None
    errors = {rank: first_line(error)}
    errors.update((other, line) for other, (line, _) in watch.elsewhere.items())
    found = {rank: watch.asking.standing}
    found.update((other, place) for other, (_, place) in watch.elsewhere.items())
    text = f"{lines(found)}\n\n{_stacks(found)}"
    if any(map(_is_timeout, errors.values())):
        what = _timed_out(errors, same_place(found.values()))
        if before := watch.before(sorted(found)):
            text = f"{lines(found)}\nBefore that:\n{lines(before)}\n\n{_stacks(found)}"
        if same_place(found.values()) is False:
            what = with_code(what, "FK043")
    else:
        what = (
            f"The connection between ranks was closed although no rank failed: {errors[rank]}, "
            f"after {time.monotonic() - watch.began:.0f} s of this call. Another program, a "
            "firewall or the network may have closed it. Start the call again; resume_from "
            "continues from a checkpoint."
        )
    return Failure(max(found), what, text)


def _timed_out(errors: Mapping[int, str], is_one_place: bool | None) -> str:
    """Say why an exchange timed out, by the ranks' errors and whether they were at one place."""
    waited = [rank for rank, line in errors.items() if _is_timeout(line)]
    first = errors[waited[0]]
    limit = _seconds(first)
    if is_one_place is False:
        return (
            f"The ranks waited for each other in different exchanges until {limit} ({first}). One "
            "of them makes a call that the others don't, for example under `if "
            "model.is_global_zero:`, or is too slow, or its machine is out of reach."
        )
    late = sorted(set(errors).difference(waited))
    if is_one_place and late:
        who = (
            f"Rank {late[0]}" if len(late) == 1 else f"One of the ranks {', '.join(map(str, late))}"
        )
        return (
            f"{who} came to an exchange more than {limit} after rank {waited[0]}, which had "
            f"stopped waiting ({first}). If that is no mistake, allow more time by "
            "DDPStrategy(timeout=seconds)."
        )
    if is_one_place:
        return (
            f"All ranks waited in the same exchange until {limit} ({first}), so what they send "
            "doesn't arrive: the network, or a machine that is out of reach."
        )
    return (
        f"The ranks waited for each other until {limit} ({first}). One of them makes a call that "
        "the others don't, or is too slow, or its machine is out of reach."
    )


def _is_timeout(line: str) -> bool:
    return re.search("timed? ?out", line, re.IGNORECASE) is not None


def _seconds(line: str) -> str:
    """Return the limit that an error of torch names, in seconds."""
    found = re.search(r"(\d+) ?ms|\(ms\)=(\d+)", line)
    return f"{int(found[1] or found[2]) / 1000:g} s" if found else "the strategy's timeout"


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
