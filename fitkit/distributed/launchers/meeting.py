"""How the processes that a launcher started meet: by one store that all of them can reach.

| launcher | the store |
|---|---|
| torchrun | the agent's, where it serves one, else rank 0's at MASTER_ADDR:MASTER_PORT |
| slurm, lsf, kubeflow, fitkit | rank 0's, at the address that `detect` found |
| openmpi, pmi | rank 0's: at MASTER_ADDR, or on one node at a free port, left in a file |
| horovodrun | rank 0's: at MASTER_ADDR, or at a free port, left at horovodrun's own server |

Each call gets its own part of that store, which all ranks find before anything else. So nobody
reads keys from an earlier call, or from the ranks before a restart. With gloo and `env://`, such
keys break most of torchrun's restarts (pytorch issue 135712, still so in 2.13). The usual advice is
to name the part by TORCHELASTIC_RESTART_COUNT. But that count can be 1 on one host and 0 on
another, and the hosts would wait for each other in two parts. Here rank 0 makes up a name. It gives
the name to each rank in answer to a question that the rank has just asked. So only a living rank 0
can have answered.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from fitkit.distributed.cluster import Cluster, Environment
from fitkit.distributed.launchers.meeting_folder import SharedAddress, shared_address
from fitkit.distributed.launchers.watch import Failure, first_line
from fitkit.distributed.stores import Patience
from fitkit.errors import ConfigurationError, WorkerError, with_code

Result = TypeVar("Result")

DEFAULT_PORT = 29500
"""torch's own, where MASTER_ADDR is set and MASTER_PORT is not."""

COMMON = "fitkit/meeting"
"""The part of a store that the ranks of all calls know."""

LINGER_S = 0.5
"""How long rank 0 serves after it has written why a meeting failed, for the others to read it."""

OVERDUE_S = 2.0
"""How long after its end a wait may take to say in its own words what was missing."""

FAREWELL_S = 2.0
"""How long a process that ends may take to tell the others."""

_leaving: set[Cluster] = set()
_reached: dict[Cluster, TCPStore] = {}
"""What a launcher says holds as long as the process, and so does the connection made from it: a
later call finds rank 0's server where it was, not one that is just about to move."""


class Meeting:
    """The ranks of a call come together, each with the same call.

    Rank 0 waits for all, and the others for its word: so a store has one request of each rank at a
    time, however many there are. Torch's own wait couldn't be broken off.

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
        """The error of a meeting to which not all have come.

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
    """The failure of a rank that has said at its end that it won't come."""
    if not common.check([f"ended/{rank}"]):
        return None
    return Failure(
        rank,
        f"No more ranks will join: the script of rank {rank} has ended. Every rank has to make "
        "the same calls of fit, evaluate and predict. Does an exit or a call depend on the rank?",
    )


def meet_launched(
    cluster: Cluster, verb: str, timeout: timedelta, environment: Environment = os.environ
) -> Store:
    """Meet with the processes that a launcher started.

    For `init_process_group(store=…, rank=cluster.rank, world_size=cluster.world_size)`.

    Args:
        cluster: this process's place.
        verb: of the call.
        timeout: how long to wait for the other processes.
        environment: the variables that `cluster` was read from.

    Returns:
        A store of this call's own.

    Ranks:
        Collective: every rank calls it, equally often.

    Raises:
        ConfigurationError: there is no way to meet, or rank 0's port is taken, or the ranks make
            different calls.
        WorkerError: not all processes came in time; the message says how many did, and where.
    """
    if cluster.world_size == 1:
        return HashStore()
    address = None if cluster.master_address else shared_address(cluster, environment)
    meeting = Meeting(cluster.rank, cluster.world_size, verb, timeout)

    def meet() -> Store:
        if cluster not in _reached:
            _reached[cluster] = _reach(cluster, address, environment, meeting.patience)
        store = _reached[cluster]
        meeting.where = f"{cluster.master_address or store.host}:{store.port}"
        return meeting.in_part_of(store)

    try:
        return _bounded(meet, cluster, meeting.patience)
    except BaseException:
        _reached.pop(cluster, None)
        raise
    finally:
        if address is not None and cluster.rank == 0:
            address.remove()


def announce_exit(cluster: Cluster, environment: Environment = os.environ) -> None:
    """Let ranks that wait for this one know when its process has ended.

    Not where ranks are started again: what those before a restart said would mislead.

    Args:
        cluster: this process's place.
        environment: the variables that `cluster` was read from.
    """
    if not (cluster.elastic or cluster.world_size == 1 or cluster in _leaving):
        _leaving.add(cluster)
        atexit.register(_announce, cluster, environment, os.getpid())


def _announce(cluster: Cluster, environment: Environment, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of that process
    store, port = _reached.get(cluster), cluster.master_port or DEFAULT_PORT
    if store is None and cluster.master_address and _agent_serves(environment):
        store, _ = _try(cluster.master_address, port, Patience(FAREWELL_S))
    try:
        if store is not None:
            common = PrefixStore(COMMON, store)
            common.set(f"ended/{cluster.rank}", "")
            common.add("ended", 1)
    except DistError:
        pass  # The process that serves has ended before.


def _agent_serves(environment: Environment) -> bool:
    """Whether torchrun's agent serves a store, and not rank 0."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _bounded(work: Callable[[], Result], cluster: Cluster, patience: Patience) -> Result:
    """`work` in a thread, so that Ctrl-C is heard and the wait ends whatever happens.

    Nothing in C++ hears Ctrl-C, and some of it has no limit: a TCPStore waits for ever for a
    server that accepts and then says nothing (torch 2.13).
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="fitkit-meeting", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
            if patience.overdrawn_s > OVERDUE_S:
                raise _unreached(cluster, "it accepts connections but doesn't answer", patience)
    finally:
        patience.end()
    if errors:
        raise errors[0]
    return results[0]


def _reach(
    cluster: Cluster, address: SharedAddress | None, environment: Environment, patience: Patience
) -> TCPStore:
    """Rank 0's server or the agent's, served or connected to."""
    if address is not None and cluster.rank > 0:
        return _follow(address, cluster, patience)
    if address is not None:
        server = _serve(cluster, 0, patience)
        token = uuid.uuid4().hex
        server.set("fitkit/token", token)
        address.write(server.port, token)
        return server
    port = cluster.master_port or DEFAULT_PORT
    if cluster.rank == 0 and not _agent_serves(environment):
        return _serve(cluster, port, patience)
    return _connect(cluster, port, patience)


def _serve(cluster: Cluster, port: int, patience: Patience) -> TCPStore:
    timeout = timedelta(seconds=patience.timeout_s)
    listening = _listen_here_only(cluster, port)
    try:
        # Without that socket it listens on all interfaces; the address is for rank 0 alone.
        # Multi-tenant: where the script's own `env://` group has a server here, it is shared.
        return TCPStore(
            "127.0.0.1",
            port if listening is None else listening.getsockname()[1],
            None,
            True,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except DistError as error:
        raise ConfigurationError(
            f"rank 0 can't listen on port {port}, where the other processes look for it: "
            f"{first_line(error)}. Set MASTER_PORT to a free port, the same for all processes."
        ) from error


def _listen_here_only(cluster: Cluster, port: int) -> socket.socket | None:
    """A socket for processes that look for rank 0 on this machine; None where others may, too."""
    address = cluster.master_address
    is_left_in_a_file = address is None and cluster.launcher != "horovodrun"
    if cluster.num_nodes > 1 or not (is_left_in_a_file or address in ("127.0.0.1", "localhost")):
        return None
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:  # The script's own server, or another's: TCPStore tells them apart.
        return None


def _connect(cluster: Cluster, port: int, patience: Patience) -> TCPStore:
    assert cluster.master_address is not None
    while True:
        store, reason = _try(cluster.master_address, port, patience)
        if store is not None:
            return store
        if not patience.remains():
            raise _unreached(cluster, reason, patience)


def _follow(address: SharedAddress, cluster: Cluster, patience: Patience) -> TCPStore:
    """The server at the address that rank 0 left; one from an earlier run leads nowhere."""
    reason = "rank 0 wrote no address there"
    while patience.remains():
        left = address.read()
        if left is not None:
            store, reason = _try(left.host, left.port, patience)
            if store is not None and store.check(["fitkit/token"]):
                if store.get("fitkit/token").decode() == left.token:
                    return store
                reason = "another program listens at the address there"
    raise _unreached(cluster, f"{address}: {reason}", patience)


def _try(host: str, port: int, patience: Patience) -> tuple[TCPStore | None, str]:
    """A connection, or None and the reason.

    Asked with a plain socket first: TCPStore prints pages of C++ stacks while nobody listens.
    """
    try:
        socket.create_connection((host, port), timeout=5.0).close()
        timeout = timedelta(seconds=patience.timeout_s)
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False), ""
    except (OSError, DistError) as error:
        return None, first_line(error)


def _unreached(cluster: Cluster, reason: str, patience: Patience) -> WorkerError:
    address, port = cluster.master_address, cluster.master_port or DEFAULT_PORT
    where = f" at {address}:{port}" if address else ""
    message = with_code(
        f"1 of {cluster.world_size} processes joined: rank {cluster.rank} couldn't reach rank "
        f"0{where} within {patience.timeout_s:g} s ({reason}). Start rank 0 too, and check its "
        "address (MASTER_ADDR, MASTER_PORT) and the firewalls between the machines.",
        "FK051",
    )
    return WorkerError(message)
