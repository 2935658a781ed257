"""How the processes that a launcher started meet: one store that all of them can reach.

| launcher | the store |
|---|---|
| torchrun | the agent's, where it serves one, else rank 0's at MASTER_ADDR:MASTER_PORT |
| slurm, lsf, kubeflow, fitkit | rank 0's, at the address that `detect` found |
| openmpi, pmi | rank 0's: at MASTER_ADDR, or on one node at a free port, left in a file |
| horovodrun | rank 0's: at MASTER_ADDR, or at a free port, left at horovodrun's own server |

Each call gets a room of its own in that store, which all ranks enter before anything else is
done. So nobody reads keys that an earlier call, or the ranks before a restart, left behind:
such keys end most of torchrun's restarts with gloo and `env://` (pytorch issue 135712, still so
in 2.13). Naming the room by TORCHELASTIC_RESTART_COUNT is the usual advice, but that count can
be 1 on one host and 0 on another, and they would wait for each other in two rooms. Here rank 0
makes up a name and gives it to each rank in answer to a note that the rank has just written:
only a rank 0 that lives can have answered that.
"""

from __future__ import annotations

import atexit
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
from fitkit.distributed.notice_boards import NoticeBoard, board_for
from fitkit.errors import ConfigurationError, WorkerError

Result = TypeVar("Result")

DEFAULT_PORT = 29500
"""torch's own, where MASTER_ADDR is set and MASTER_PORT is not."""

LONGEST_PAUSE_S = 0.1
"""Between two looks at the store."""

LINGER_S = 0.5
"""How long rank 0 serves after it has said that the meeting failed, for the others to read it."""

GRACE_S = 2.0
"""How long after its end a wait may take to say in its own words what was missing."""

FAREWELL_S = 2.0
"""How long a process that ends may take to tell the others."""

_leaving: set[Cluster] = set()
_reached: dict[Cluster, TCPStore] = {}
"""What a launcher says holds as long as the process, and so does the connection made from it: a
later call finds rank 0's server where it was, not one that is just about to move."""


def store_for(cluster: Cluster, timeout: timedelta, environment: Environment = os.environ) -> Store:
    """A store of this call's own, once all processes have come.

    For `init_process_group(store=…, rank=cluster.rank, world_size=cluster.world_size)`.

    Args:
        cluster: this process's place.
        timeout: how long to wait for the other processes.
        environment: the variables that `cluster` was read from.

    Ranks:
        Collective: every rank calls it, equally often.

    Raises:
        ConfigurationError: there is no way to meet, or rank 0's port is taken.
        WorkerError: not all processes came in time; the message says how many did, and where.
    """
    if cluster.world_size == 1:
        return HashStore()
    board = None if cluster.master_address else board_for(cluster, environment)
    patience = _Patience(timeout)

    def meet() -> Store:
        if cluster not in _reached:
            _reached[cluster] = _reach(cluster, board, environment, patience)
        store = _reached[cluster]
        where = f"{cluster.master_address or store.host}:{store.port}"
        return _enter(store, cluster.rank, cluster.world_size, where, patience)

    try:
        return _bounded(meet, cluster, patience)
    except BaseException:
        _reached.pop(cluster, None)
        raise
    finally:
        if board is not None and cluster.rank == 0:
            board.clear()


def enter_room(
    store: Store, rank: int, world_size: int, timeout: timedelta, where: str = "the store"
) -> Store:
    """A part of `store` that only this call's ranks know, once all of them have come.

    For launchers that have a store already.

    Args:
        store: what all ranks can reach.
        rank: of this process.
        world_size: how many come.
        timeout: how long to wait for them.
        where: the store's address, for the message.

    Ranks:
        Collective.

    Raises:
        WorkerError: not all came in time.
    """
    return _enter(store, rank, world_size, where, _Patience(timeout))


def tell_at_exit(cluster: Cluster, environment: Environment = os.environ) -> None:
    """Let ranks that wait for this one know when its process has ended.

    Not where ranks are started again: what those before a restart said would mislead.

    Args:
        cluster: this process's place.
        environment: the variables that `cluster` was read from.
    """
    if not (cluster.elastic or cluster.world_size == 1 or cluster in _leaving):
        _leaving.add(cluster)
        atexit.register(_tell, cluster, environment, os.getpid())


def _tell(cluster: Cluster, environment: Environment, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of that process
    store, port = _reached.get(cluster), cluster.master_port or DEFAULT_PORT
    if store is None and cluster.master_address and _agent_serves(environment):
        patience = _Patience(timedelta(seconds=FAREWELL_S))
        store, _ = _try(cluster.master_address, port, patience)
    try:
        if store is not None:
            PrefixStore("fitkit/hall", store).set(f"ended/{cluster.rank}", "")
    except DistError:
        pass  # The process that serves has ended before.


def _agent_serves(environment: Environment) -> bool:
    """Whether torchrun's agent serves a store, and not rank 0."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class _Patience:
    """How long a wait may last, on the monotonic clock."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()
        self._end = time.monotonic() + self.timeout_s
        self._pause_s = 0.002

    def remains(self) -> bool:
        """Pause a little, longer each time; whether there is time for another look."""
        self._pause_s = min(self._pause_s * 1.5, LONGEST_PAUSE_S)
        time.sleep(self._pause_s)
        return time.monotonic() < self._end

    @property
    def overdrawn_s(self) -> float:
        """How long ago the wait should have ended; negative before."""
        return time.monotonic() - self._end

    def end(self) -> None:
        """No more looks: the caller has left."""
        self._end = 0.0


def _bounded(work: Callable[[], Result], cluster: Cluster, patience: _Patience) -> Result:
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

    thread = threading.Thread(target=run, name="fitkit-rendezvous", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
            if patience.overdrawn_s > GRACE_S:
                raise _unreached(cluster, "it accepts connections but doesn't answer", patience)
    finally:
        patience.end()
    if errors:
        raise errors[0]
    return results[0]


def _reach(
    cluster: Cluster, board: NoticeBoard | None, environment: Environment, patience: _Patience
) -> TCPStore:
    """Rank 0's server or the agent's, served or connected to."""
    if board is not None and cluster.rank > 0:
        return _follow(board, cluster, patience)
    if board is not None:
        server = _serve(cluster, 0, patience)
        token = uuid.uuid4().hex
        server.set("fitkit/token", token)
        board.post(server.port, token)
        return server
    port = cluster.master_port or DEFAULT_PORT
    if cluster.rank == 0 and not _agent_serves(environment):
        return _serve(cluster, port, patience)
    return _connect(cluster, port, patience)


def _serve(cluster: Cluster, port: int, patience: _Patience) -> TCPStore:
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
            f"rank 0 can't serve at port {port}, where the other processes look for it: "
            f"{_first_line(error)}. Set MASTER_PORT to a free port, the same for all processes."
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


def _connect(cluster: Cluster, port: int, patience: _Patience) -> TCPStore:
    assert cluster.master_address is not None
    while True:
        store, reason = _try(cluster.master_address, port, patience)
        if store is not None:
            return store
        if not patience.remains():
            raise _unreached(cluster, reason, patience)


def _follow(board: NoticeBoard, cluster: Cluster, patience: _Patience) -> TCPStore:
    """The server that rank 0's notice names; one from an earlier run leads nowhere."""
    reason = "rank 0 left no address there"
    while patience.remains():
        notice = board.read()
        if notice is not None:
            store, reason = _try(notice.host, notice.port, patience)
            if store is not None and store.check(["fitkit/token"]):
                if store.get("fitkit/token").decode() == notice.token:
                    return store
                reason = "another program serves at the address that was left there"
    raise _unreached(cluster, f"{board}: {reason}", patience)


def _try(host: str, port: int, patience: _Patience) -> tuple[TCPStore | None, str]:
    """A connection, or None and the reason.

    Asked with a plain socket first: TCPStore prints pages of C++ stacks while nobody listens.
    """
    try:
        socket.create_connection((host, port), timeout=5.0).close()
        timeout = timedelta(seconds=patience.timeout_s)
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False), ""
    except (OSError, DistError) as error:
        return None, _first_line(error)


def _enter(store: Store, rank: int, world_size: int, where: str, patience: _Patience) -> Store:
    hall = PrefixStore("fitkit/hall", store)
    try:
        if rank == 0:
            room = _open_room(hall, world_size, where, patience)
        else:
            room = _be_let_in(hall, rank, world_size, where, patience)
    except DistError as error:
        raise WorkerError(
            f"rank {rank} lost its connection to {where} while the {world_size} processes met "
            f"({_first_line(error)}): the process that serves there ended."
        ) from error
    return PrefixStore(f"fitkit/room/{room}", store)


def _open_room(hall: Store, world_size: int, where: str, patience: _Patience) -> str:
    """Rank 0: answer each rank's newest note until all have said that they are in."""
    room = uuid.uuid4().hex
    absent = set(range(1, world_size))
    answered: dict[int, str] = {}
    while True:
        for other in sorted(absent):
            if hall.check([f"{room}/{other}"]):
                absent.discard(other)
                hall.delete_key(f"note/{other}")
                hall.delete_key(f"answer/{answered[other]}")
            elif hall.check([f"note/{other}"]):
                note = hall.get(f"note/{other}").decode()
                if answered.get(other) != note:
                    hall.set(f"answer/{note}", room)
                    answered[other] = note
        if not absent:
            hall.set(f"{room}/verdict", "")
            return room
        ended = {other for other in absent if hall.check([f"ended/{other}"])}
        if ended or not patience.remains():
            error = (
                _ended(world_size, ended, absent)
                if ended
                else _incomplete(world_size, absent, where, patience)
            )
            hall.set(f"{room}/verdict", str(error))
            time.sleep(LINGER_S)
            raise error


def _be_let_in(hall: Store, rank: int, world_size: int, where: str, patience: _Patience) -> str:
    """Another rank: leave a note, take rank 0's answer, and wait until all are in."""
    note = uuid.uuid4().hex
    hall.set(f"note/{rank}", note)
    room = _read(hall, f"answer/{note}", patience)
    if room is None and hall.check(["ended/0"]):
        raise _ended(world_size, {0}, {0})
    if room is None:
        raise _incomplete(world_size, {0}, where, patience)
    hall.set(f"{room}/{rank}", "")
    verdict = _read(hall, f"{room}/verdict", patience)
    if verdict is None:
        absent = {other for other in range(1, world_size) if not hall.check([f"{room}/{other}"])}
        raise _incomplete(world_size, absent, where, patience)
    if verdict:
        raise WorkerError(verdict)
    return room


def _read(hall: Store, key: str, patience: _Patience) -> str | None:
    """The value of a key that rank 0 is still to set; None where it doesn't, or has ended."""
    while not hall.check([key]):
        if not patience.remains() or hall.check(["ended/0"]):
            return None
    return hall.get(key).decode()


def _incomplete(world_size: int, absent: set[int], where: str, patience: _Patience) -> WorkerError:
    """Too few joined. What a rank that waits for rank 0 knows is itself only."""
    ranks = sorted(absent)
    joined = 1 if ranks == [0] else world_size - len(ranks)
    listing = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return WorkerError(
        f"{joined} of {world_size} processes joined at {where} within {patience.timeout_s:g} s; "
        f"missing: rank {listing}. Every process has to be started and to make the same calls of "
        "fit, evaluate and predict.",
        rank=ranks[0] if ranks else 0,
    )


def _ended(world_size: int, ended: set[int], absent: set[int]) -> WorkerError:
    """Some of those who don't come have ended: there is nothing to wait for."""
    ranks = sorted(ended)
    listing = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return WorkerError(
        f"{world_size - len(absent)} of {world_size} processes joined this call, and none will "
        f"follow: the script of rank {listing} has ended. Every rank has to make the same calls "
        "of fit, evaluate and predict; is an exit or a call under a condition on the rank?",
        rank=ranks[0],
    )


def _unreached(cluster: Cluster, reason: str, patience: _Patience) -> WorkerError:
    address, port = cluster.master_address, cluster.master_port or DEFAULT_PORT
    where = f" at {address}:{port}" if address else ""
    return WorkerError(
        f"1 of {cluster.world_size} processes joined: rank {cluster.rank} couldn't reach rank 0"
        f"{where} within {patience.timeout_s:g} s ({reason}). Start rank 0 too, and see that its "
        "address (MASTER_ADDR, MASTER_PORT) is right and no firewall is between."
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
