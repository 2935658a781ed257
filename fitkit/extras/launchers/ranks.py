"""The launcher of ranks that exist already: each makes the same calls and gets their results."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from fitkit.accelerators import current
from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.launchers import group
from fitkit.extras.launchers.launched import announce_exit, meet_launched
from fitkit.extras.launchers.meeting import Meeting
from fitkit.extras.launchers.other_ranks import OtherRanks
from fitkit.extras.launchers.stores import Patience
from fitkit.extras.launchers.watch import (
    Failure,
    Watch,
    broken_exchange,
    shows_broken_exchange,
)
from fitkit.seams.launchers import abandon, in_own_group, silence_s, users_store
from fitkit.seams.machines import Cluster
from fitkit.seams.strategies import Collectives, World

Result = TypeVar("Result")

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's own for gloo: one rank may prepare data while the others wait for it."""
LEAVE_S = 3.0
"""How long a failed rank may take to leave the process group."""
EXIT_S = 10
"""How long a process whose group didn't let it go may take to end."""


class JoinsRanks(Protocol):
    """What a launcher needs of a strategy.

    Attributes:
        world: this process's place.
        collectives: by which the ranks exchange objects, after `join`.
        timeout: of each exchange; None for the default.
    """

    world: World
    collectives: Collectives
    timeout: timedelta | None

    @property
    def device(self) -> torch.device:
        """This rank's device."""

    def join(self, store: Store | None = None) -> None:
        """Enter the ranks' process group."""

    def leave(self) -> None:
        """Leave it."""


class RankLauncher:
    """Makes a call that every rank makes too.

    Another launcher, such as torchrun, has started the processes, or a subclass starts them.

    Each call has a process group of its own, so that nothing is left of one that failed. A
    group that the script made itself is used, and left alone.

    Args:
        strategy: enters and leaves the ranks' process group.
        cluster: this process's place among those that a launcher such as torchrun started; None
            where a process of fitkit's started them.
        timeout: how long they wait for each other to come to a call; None for the strategy's.
        store: for the next call only, if the maker of this object has one.

    Attributes:
        others: what is known of the other ranks here.
    """

    ends_process = True
    """Whether a process that doesn't come out of a call after another's failure may be ended."""

    sends_calls: bool = False

    def __init__(
        self,
        strategy: JoinsRanks,
        cluster: Cluster | None = None,
        timeout: timedelta | None = None,
        store: Store | None = None,
    ) -> None:
        self.strategy = strategy
        self.cluster = cluster
        self.timeout: timedelta = timeout or strategy.timeout or DEFAULT_TIMEOUT
        self.others: OtherRanks = OtherRanks()
        self.call_store = store
        self._store: Store | None = None  # of the last call
        self._done: dict[str, int] = {}  # since then, on rank 0 alone
        if cluster is not None:
            announce_exit(cluster)

    def launch(self, verb: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function(*arguments)` here, as all other ranks do.

        The ranks meet, enter the process group, make the call, wait for each other, and leave.
        A `Watch` looks after the other ranks meanwhile.

        Args:
            verb: the call's name, such as "fit". Ranks that meet for two verbs say so.

        Returns:
            What this rank's call gave.

        Ranks:
            Collective.

        Raises:
            WorkerError: another rank failed. A rank that fails itself raises its own error.
        """
        with current(self.strategy.device):  # whose the group is
            if in_own_group():
                return self._inside(function, arguments)
            return self._together(verb, function, arguments)

    def _together(
        self, verb: str, function: Callable[..., Result], arguments: tuple[Any, ...]
    ) -> Result:
        """Return a call for which the ranks meet, and enter a process group."""
        self._store, self._done, quiet_s = None, {}, silence_s()
        rank, size = self.strategy.world.rank, self.strategy.world.size
        with self.others.during_call():
            store = self._meet(verb)
            with Watch(
                store,
                rank,
                size,
                self.others.lost,
                group.abort,
                self.ends_process,
                quiet_s,
                sees_waits=self.strategy.device.type == "cpu",
                is_near=self.strategy.world.num_nodes == 1,
            ) as watch:
                try:
                    self.strategy.join(store)
                    result = function(*arguments)
                    self.strategy.collectives.gather(None)  # Every rank has come to the end.
                    self.strategy.leave()
                    self._store = store
                    return result
                except BaseException as error:
                    failure = self._leave_after(error, watch)
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
        store, rank = self._store, self.strategy.world.rank
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
                    if store is not None:
                        store.set(key, problem)
        elif store is not None and (problem := self._awaited(store, key)):
            raise WorkerError(problem, 0)

    def _awaited(self, store: Store, key: str) -> str:
        """Return what rank 0 says at its work's end: nothing where that went well."""
        patience = Patience(self.timeout.total_seconds(), 0.05, self.strategy.world.size)
        try:
            while not store.check([key]):
                if (failure := self.others.lost()) is not None and not store.check([key]):
                    return failure.what
                if not patience.remains():
                    return f"Rank 0 didn't finish within {patience.timeout_s:g} s."
            return store.get(key).decode()
        except (DistError, OSError):
            return ""  # rank 0, which served the store, has ended after its work

    # ------------------------------------------------------------------ a call

    def _meet(self, verb: str) -> Store:
        """Wait until all ranks make this call; a store, or a part of one, for it alone.

        Raises:
            WorkerError: a rank ended or failed, or doesn't come.
            ConfigurationError: a rank makes another call.
        """
        place = self.strategy.world
        if self.call_store is not None:
            meeting = Meeting(place.rank, place.size, verb, self.timeout)
            return meeting.at(self.call_store, self.others.lost)
        store = users_store()
        if store is None:
            assert self.cluster is not None
            return meet_launched(self.cluster, verb, self.timeout)
        where = "the script's process group"
        return Meeting(place.rank, place.size, verb, self.timeout, where).in_part_of(store)

    def _inside(self, function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        """Return a call inside a call, by a callback for another model: all ranks are here."""
        self.strategy.join()
        try:
            return function(*arguments)
        finally:
            self.strategy.leave()

    def _leave_after(self, error: BaseException, watch: Watch) -> WorkerError | None:
        """Leave the process group after an error, and decide which error `launch` raises.

        Returns:
            The error of the rank that failed first. None to raise this rank's own error.
        """
        is_broken = watch.exchanges_ended or shows_broken_exchange(error)
        if isinstance(error, WorkerError) or not is_broken:
            return self._after_own(error, watch)
        return self._after_anothers(error, watch)

    def _after_own(self, error: BaseException, watch: Watch) -> WorkerError | None:
        """Report an error of this rank's own to the others, and leave.

        Returns:
            The error of the rank that failed before this one, where nothing else would show it.
            None to raise this rank's own error.
        """
        rank = self.strategy.world.rank
        local = Failure.of(rank, error)
        first = watch.report(local)
        self._release()
        # Where all ranks raise one error (a file that can't be written), it is rank 0's, and so is
        # what was asked and can't be, on any rank, and what the user does.
        is_same = first.what.partition(":")[2] == local.what.partition(":")[2]
        is_shown = self.others.prints or rank != 0 or not first.raised or is_same
        if is_shown or not local.raised or not isinstance(error, Exception):
            return None
        return None if isinstance(error, ConfigurationError) else first.as_error()

    def _after_anothers(self, error: BaseException, watch: Watch) -> WorkerError:
        """Leave after an error that only shows a lost connection; return its cause.

        Another rank has reported it.
        """
        self._release()  # First: ranks that wait for this one come out, too.
        failure = watch.cause(error) or broken_exchange(self.strategy.world.rank, error, watch)
        # What this rank was doing explains nothing, and holds DataLoader workers and ports.
        traceback.clear_frames(error.__traceback__)
        if not (failure.raised and self.others.prints):
            return failure.as_error()
        note = "That rank prints its traceback. The error's remote_traceback has it too."
        return WorkerError(f"{failure.what}\n{note}", failure.rank, failure.text)

    def _release(self) -> None:
        """Free the ranks that wait for this one in an exchange."""
        self._leave()

    def _leave(self) -> None:
        """Leave the process group within `LEAVE_S`; its threads may hang in an exchange."""
        group.hang_up()
        thread = threading.Thread(target=self.strategy.leave, name="fitkit-leave", daemon=True)
        thread.start()
        thread.join(LEAVE_S)
        if thread.is_alive():
            abandon()
            atexit.register(_end_in_time)


def _end_in_time() -> None:
    """Let the kernel end this process: at exit, torch joins threads that may wait for ever."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_S)
