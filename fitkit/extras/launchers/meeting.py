"""How the ranks of a call meet: by one store that all of them can reach, and a part of it alone.

Each call gets its own part of that store, which all ranks find before anything else. So nobody
reads keys from an earlier call, or from the ranks before a restart. With gloo and `env://`, such
keys break most of torchrun's restarts (pytorch issue 135712, still so in 2.13). The usual advice is
to name the part by TORCHELASTIC_RESTART_COUNT. But that count can be 1 on one host and 0 on
another, and the hosts would wait for each other in two parts. Here rank 0 makes up a name. It gives
the name to each rank in answer to a question that the rank has just asked. So only a living rank 0
can have answered.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from fitkit.errors import ConfigurationError, WorkerError
from fitkit.extras.launchers.stores import Patience
from fitkit.extras.launchers.watch import Failure, first_line

COMMON = "fitkit/meeting"
"""The part of a store that the ranks of all calls know."""

LINGER_S = 0.5
"""How long rank 0 serves after it has written why a meeting failed, for the others to read it."""


class Meeting:
    """The ranks of a call come together, each with the same call.

    Rank 0 waits for all, and the others for its word: so a store has one request of each rank at a
    time, however many there are. Torch's own wait couldn't be ended.

    Args:
        rank, size: of this process.
        verb: of the call that it makes.
        timeout: how long to wait for the other ranks.
        where: the store's address, for the message.
    """

    def __init__(
        self, rank: int, size: int, verb: str, timeout: timedelta, where: str = ""
    ) -> None:
        self._rank = rank
        self._size = size
        self._verb = verb
        # Rank 0 alone keeps its pauses, for all others wait for it.
        self.patience: Patience = Patience(
            timeout.total_seconds(), ranks=size if rank else 1, requests=3
        )
        self.where = where

    def at(self, store: Store, lost: Callable[[], Failure | None]) -> Store:
        """Meet at a store that is this call's alone.

        Args:
            lost: gives the failure of a rank that won't come, where this process can know that.

        Returns:
            The store, once all have come.

        Raises:
            WorkerError: a rank has failed, or won't come, or didn't in time.
            ConfigurationError: the ranks make different calls.
        """
        here = [f"here/{rank}" for rank in range(self._size)]
        store.set(here[self._rank], self._verb)
        store.add("arrived", 1)
        awaited = ["all are here"] if self._rank else here
        self.patience.begin()
        try:
            while not store.check(awaited):
                if (failure := Failure.first(store)) is not None:
                    raise failure.as_error()
                failure, late = lost(), not self.patience.remains()
                if failure is not None or late:
                    missing = [rank for rank, key in enumerate(here) if not store.check([key])]
                    raise self._incomplete(missing, failure)
        except DistError:
            raise
        except BaseException as error:
            Failure.of(self._rank, error).write(store)
            raise
        if self._rank == 0:
            calls = {store.get(key).decode(): rank for rank, key in enumerate(here)}
            store.set("all are here", json.dumps(calls))
        else:
            calls = json.loads(store.get("all are here"))
        for verb, rank in calls.items():
            if verb != self._verb:
                raise ConfigurationError(
                    f"This rank ({self._rank}) calls {self._verb}, but rank {rank} calls {verb}. "
                    "Every rank has to make the same calls in the same order: is one of them "
                    "under `if model.is_global_zero:`?",
                    code="FK043",
                )
        return store

    def in_part_of(self, store: Store) -> Store:
        """Meet in a part of a store that only this call's ranks know.

        Returns:
            The part, once all have come.

        Raises:
            WorkerError, ConfigurationError: as `at`.
        """
        common = PrefixStore(COMMON, store)
        try:
            if self._rank == 0:
                return self._open_part(store, common)
            question = uuid.uuid4().hex
            common.set(f"question/{self._rank}", question)
            common.add("asked", 1)
            while not common.check([f"answer/{question}"]):
                failure, late = _ended(common, 0), not self.patience.remains()
                if failure is not None or late:
                    raise self._incomplete([0], failure, count=1)  # that it knows of
            part = PrefixStore(common.get(f"answer/{question}").decode(), store)
            return self.at(part, lambda: _ended(common, 0))
        except DistError as error:
            raise WorkerError(
                f"rank {self._rank} lost its connection to {self.where} while the {self._size} "
                f"processes were connecting ({first_line(error)}). The process that serves it "
                "ended."
            ) from error

    def _open_part(self, store: Store, common: Store) -> Store:
        """Rank 0: answer each rank's newest question until all have come."""
        name = f"fitkit/call/{uuid.uuid4().hex}"
        part = PrefixStore(name, store)
        absent = list(range(1, self._size))
        answered: dict[int, str] = {}

        seen: list[int] = []

        def answer() -> Failure | None:
            counts = [part.add("arrived", 0), common.add("asked", 0), common.add("ended", 0)]
            if counts == seen:
                return None  # Else each look would take requests for each rank.
            seen[:] = counts
            for other in [rank for rank in absent if part.check([f"here/{rank}"])]:
                absent.remove(other)
            for other in absent:
                if common.check([f"question/{other}"]):
                    question = common.get(f"question/{other}").decode()
                    if answered.get(other) != question:
                        common.set(f"answer/{question}", name)
                        answered[other] = question
            return next(filter(None, (_ended(common, other) for other in absent)), None)

        try:
            self.at(part, answer)
        except WorkerError:
            time.sleep(LINGER_S)
            raise
        for other, question in answered.items():
            common.delete_key(f"question/{other}")
            common.delete_key(f"answer/{question}")
        return part

    def _incomplete(
        self, missing: list[int], failure: Failure | None, count: int | None = None
    ) -> WorkerError:
        """Return the error of a meeting to which not all have come.

        Args:
            missing: ranks.
            failure: why one of them won't come; None where the time is over.
            count: how many have come; None for all but those.
        """
        count = self._size - len(missing) if count is None else count
        joined = f"{count} of {self._size} ranks joined this call of {self._verb}"
        if self.where:
            joined = f"{count} of {self._size} processes joined at {self.where}"
        if failure is not None:
            return failure.as_error(f"{joined}. ")
        listing = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return WorkerError(
            f"{joined} within {self.patience.timeout_s:g} s; missing: rank {listing}. Every rank "
            "has to be started and to make the same calls in the same order: is this one under "
            "`if model.is_global_zero:`?",
            missing[0] if missing else 0,
        )


def _ended(common: Store, rank: int) -> Failure | None:
    """Return the failure of a rank that has said at its end that it won't come."""
    if not common.check([f"ended/{rank}"]):
        return None
    return Failure(
        rank,
        f"No more ranks will join: the script of rank {rank} has ended. Every rank has to make "
        "the same calls of fit, evaluate and predict. Does an exit or a call depend on the rank?",
    )
