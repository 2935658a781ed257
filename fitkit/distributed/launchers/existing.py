"""The launcher of ranks that exist already: each makes the same calls and gets their results."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from fitkit.distributed import world
from fitkit.distributed.cluster import Cluster
from fitkit.distributed.launchers.watch import Failure, Watch, broken_exchange
from fitkit.distributed.launchers.worker import is_collateral
from fitkit.distributed.rendezvous import enter_room, store_for, tell_at_exit
from fitkit.errors import ConfigurationError, WorkerError

if TYPE_CHECKING:
    from fitkit.distributed.strategies.base import Strategy

Result = TypeVar("Result")

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's own for gloo: one rank may prepare data while the others wait for it."""
LEAVE_S = 3.0
"""How long a failed rank may take to leave the process group."""
EXIT_S = 10
"""How long a process whose group didn't let it go may take to end."""
LONGEST_PAUSE_S = 0.05
"""Between two looks at the store."""


class ExistingLauncher:
    """Makes a call that every rank makes too, in processes that some launcher started.

    Each call has a process group of its own, so that nothing is left of one that failed. A
    group that the script made itself is used, and left alone.

    Args:
        strategy: enters and leaves the ranks' process group.
        cluster: this process's place among the ranks.
    """

    prints_apart = True
    """Whether the user sees what the other ranks print."""

    def __init__(self, strategy: Strategy, cluster: Cluster) -> None:
        self.strategy = strategy
        self.cluster = cluster
        self._room: Store | None = None  # of the last call
        self._done: dict[str, int] = {}  # since then, on rank 0 alone
        if cluster.launcher != "fitkit":
            tell_at_exit(cluster)

    def launch(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function(*arguments)` here, as all other ranks do.

        Returns:
            What this rank's call gave.

        Ranks:
            Collective.

        Raises:
            WorkerError: another rank failed. A rank that fails itself raises its own error.
        """
        if world.in_own_group():
            return self._inside(function, arguments)
        timeout = self.strategy.timeout or DEFAULT_TIMEOUT
        self._room, self._done = None, {}
        room = self.meet(timeout)
        rank, size = self.strategy.world.rank, self.strategy.world.size
        watch = Watch(room, rank, size, self.lost, self.break_off)
        with self.surroundings(), watch:
            try:
                self._gather_ranks(_verb(function), room, watch, timeout)
                self.strategy.join(room)
                result = function(*arguments)
                self.strategy.collectives.gather(None)  # Every rank has come to the end.
                self.strategy.leave()
                self._room = room
                return result
            except BaseException as error:
                failure = self._settle(error, watch)
                if failure is None:
                    raise
        try:
            raise failure
        finally:
            del failure  # Else this frame and the error keep each other, and all that they hold.

    def on_rank_zero(self, what: str, work: Callable[[], None]) -> None:
        """Do something on rank 0; the others wait until it is done, and share its failure.

        Rank 0 waits for nobody, so it may be called there alone.

        Args:
            what: says which piece of work is meant, where ranks do several between two calls.

        Raises:
            WorkerError: it failed on rank 0, or isn't done in time.
        """
        room, rank = self._room, self.strategy.world.rank
        self._done[what] = self._done.get(what, 0) + 1
        key = f"done/{self._done[what]}/{what}"
        if rank == 0:
            problem = "Rank 0 was interrupted."
            try:
                work()
                problem = ""
            except Exception as error:
                problem = f"Rank 0 failed ({type(error).__name__}: {error})."
                raise
            finally:
                with contextlib.suppress(Exception):  # nobody may be there to read it
                    if room is not None:
                        room.set(key, problem)
        elif room is not None and (told := self._awaited(room, key)):
            raise WorkerError(told, 0)

    def _awaited(self, room: Store, key: str) -> str:
        """What rank 0 says at its work's end: nothing where that went well."""
        timeout = self.strategy.timeout or DEFAULT_TIMEOUT
        deadline, pause_s = time.monotonic() + timeout.total_seconds(), 0.002
        try:
            while not room.check([key]):
                if time.monotonic() > deadline:
                    return f"Rank 0 wasn't done within {timeout.total_seconds():g} s."
                if (failure := self.lost()) is not None and not room.check([key]):
                    return failure.what
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            return room.get(key).decode()
        except (DistError, OSError):
            return ""  # rank 0, which served the store, has ended after its work

    # ------------------------------------------------------------------ what launchers differ in

    def meet(self, timeout: timedelta) -> Store:
        """A part of a store for this call alone."""
        store = world.users_store()
        if store is None:
            return store_for(self.cluster, timeout)
        place = self.strategy.world
        return enter_room(store, place.rank, place.size, timeout, "the script's process group")

    def surroundings(self) -> AbstractContextManager[Any]:
        """What holds for the length of a call."""
        return contextlib.nullcontext()

    def lost(self) -> Failure | None:
        """The failure of a rank that has ended; None where none has, or nobody here can know."""
        return None

    def break_off(self) -> None:
        """End this process's exchanges."""
        world.abort()

    # ------------------------------------------------------------------ a call

    def _inside(self, function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        """A call inside a call, by a callback for another model: all ranks are here."""
        self.strategy.join()
        try:
            return function(*arguments)
        finally:
            self.strategy.leave()

    def _gather_ranks(self, verb: str, room: Store, watch: Watch, timeout: timedelta) -> None:
        """Wait until all ranks make this call; torch's own wait couldn't be broken off.

        Raises:
            WorkerError: a rank ended or failed, or doesn't come.
            ConfigurationError: a rank makes another call.
        """
        size = self.strategy.world.size
        keys = [f"here/{rank}" for rank in range(size)]
        room.set(keys[self.strategy.world.rank], verb)
        deadline, pause_s = time.monotonic() + timeout.total_seconds(), 0.002
        while not room.check(keys):
            late = time.monotonic() > deadline
            if watch.failure is not None or late:
                missing = [rank for rank in range(size) if not room.check([keys[rank]])]
                raise self._incomplete(verb, missing, watch.failure, timeout)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        for rank, key in enumerate(keys):
            other = room.get(key).decode()
            if other != verb:
                raise ConfigurationError(
                    f"This rank ({self.strategy.world.rank}) calls {verb}, but rank {rank} calls "
                    f"{other}. Every rank has to make the same calls in the same order: is one of "
                    "them under `if model.is_global_zero:`?"
                )

    def _incomplete(
        self, verb: str, missing: list[int], failure: Failure | None, timeout: timedelta
    ) -> WorkerError:
        size = self.strategy.world.size
        joined = f"{size - len(missing)} of {size} ranks joined this call of {verb}"
        if failure is not None:
            return WorkerError(f"{joined}. {self._told(failure)}", failure.rank, failure.text)
        listing = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return WorkerError(
            f"{joined} within {timeout.total_seconds():g} s; missing: rank {listing}. Every rank "
            "has to make the same calls in the same order: is this one under "
            "`if model.is_global_zero:`?",
            missing[0] if missing else 0,
        )

    def _settle(self, error: BaseException, watch: Watch) -> WorkerError | None:
        """Leave the call; the error of the rank that failed first, or None if that is this one."""
        if isinstance(error, WorkerError):
            watch.tell(Failure(error.rank, str(error), error.remote_traceback))
            self._leave()
            return None
        if not (watch.broken_off or _broke_off(error)):
            watch.tell(Failure.of(self.strategy.world.rank, error))
            self._leave()
            return None
        self._leave()  # First: ranks that wait for this one come out, too.
        failure = watch.cause(error)
        if failure is None:
            rank = self.strategy.world.rank
            place = "".join(traceback.format_exception(error))
            failure = broken_exchange(
                rank,
                error,
                watch.elsewhere,
                f"Rank {rank} waited here:\n{place}",
                time.monotonic() - watch.began,
            )
        return self._error(failure)

    def _error(self, failure: Failure) -> WorkerError:
        return WorkerError(self._told(failure), failure.rank, failure.text)

    def _told(self, failure: Failure) -> str:
        """A failure in words; what the user has seen already isn't repeated."""
        if failure.raised and self.prints_apart:
            return f"{failure.what}\nThat rank prints its traceback; remote_traceback has it, too."
        label = "Its traceback:\n" if failure.raised else ""
        return f"{failure.what}\n\n{label}{failure.text}" if failure.text else failure.what

    def _leave(self) -> None:
        """Leave the process group although its threads may hang in an exchange."""
        world.hang_up()
        thread = threading.Thread(target=self.strategy.leave, name="fitkit-leave", daemon=True)
        thread.start()
        thread.join(LEAVE_S)
        if thread.is_alive():
            world.abandon()
            atexit.register(_end_in_time)


def _verb(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "a call").removeprefix("run_")


def _broke_off(error: BaseException) -> bool:
    """Whether an error only shows that an exchange broke off (torch's are no OSErrors)."""
    return is_collateral(error) and not isinstance(error, OSError)


def _end_in_time() -> None:
    """Let the kernel end this process: at exit, torch joins threads that may wait for ever."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_S)
