"""How the processes that a launcher started find the store by which they meet.

| launcher | the store |
|---|---|
| torchrun | the agent's, where it serves one, else rank 0's at MASTER_ADDR:MASTER_PORT |
| slurm, lsf, kubeflow, fitkit | rank 0's, at the address that `detect` found |
| openmpi, pmi | rank 0's: at MASTER_ADDR, or on one node at a free port, left in a file |
| horovodrun | rank 0's: at MASTER_ADDR, or at a free port, left at horovodrun's own server |
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from fitkit.errors import ConfigurationError, WorkerError, with_code
from fitkit.extras.launchers.meeting import COMMON, Meeting
from fitkit.extras.launchers.private_folder import parent_of, private_folder, process_name
from fitkit.extras.launchers.stores import Patience
from fitkit.extras.launchers.watch import first_line
from fitkit.seams.machines import Cluster, Environment, LaunchVariables

Result = TypeVar("Result")

DEFAULT_PORT = 29500
"""torch's own, where MASTER_ADDR is set and MASTER_PORT is not."""

OVERDUE_S = 2.0
"""How long after its end a wait may take to say in its own words what was missing."""

FAREWELL_S = 2.0
"""How long a process that ends may take to tell the others."""

_leaving: set[Cluster] = set()
_reached: dict[Cluster, TCPStore] = {}
"""What a launcher says holds as long as the process, and so does the connection made from it: a
later call finds rank 0's server where it was, not one that is just about to move."""


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
    """Return a socket for processes that look for rank 0 on this machine; None where others may,
    too.
    """
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
    """Return the server at the address that rank 0 left; one from an earlier run leads nowhere."""
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
    """Return a connection, or None and the reason.

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


# ---------------------------------------------------------------------- rank 0's address


class Address(NamedTuple):
    """Rank 0's address, and what its store says to prove that it is the one."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port} {self.token}"

    @classmethod
    def parse(cls, text: str) -> Address | None:
        match = re.fullmatch(r"(\S+):([0-9]{1,5}) (\w+)", text.strip())
        return cls(match[1], int(match[2]), match[3]) if match else None


def shared_address(cluster: Cluster, environment: Environment) -> SharedAddress:
    """Return what a cluster without an address can use.

    Raises:
        ConfigurationError: there is none, so the address has to be given.
    """
    if cluster.launcher == "horovodrun":
        read = LaunchVariables(environment, "horovodrun", "HOROVOD_RANK")
        return AddressOnServer(
            read.text("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
            read.number("HOROVOD_GLOO_RENDEZVOUS_PORT", minimum=1, maximum=65535),
        )
    if cluster.num_nodes > 1:
        raise ConfigurationError(
            f"{cluster.launcher} started {cluster.world_size} processes on {cluster.num_nodes} "
            "nodes and doesn't say where rank 0 is. Set MASTER_ADDR to the name of rank 0's host "
            "and MASTER_PORT to a free port there, for all processes (mpirun -x MASTER_ADDR=… "
            "with Open MPI, mpiexec -genv MASTER_ADDR … with MPICH and Intel MPI)."
        )
    return AddressFile(private_folder() / f"{launch_name(environment)}.address")


class AddressFile:
    """A file, for processes on one node.

    If an earlier run of the same name was killed before it could clean up, its file is overwritten.
    Until then the file leads to a store with another token, or to nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def write(self, port: int, token: str) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.write_text(str(Address("127.0.0.1", port, token)))
        temporary.replace(self.path)

    def read(self) -> Address | None:
        try:
            return Address.parse(self.path.read_text())
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class AddressOnServer:
    """The key-value server that horovodrun keeps for its workers: PUT and GET, 404 until then."""

    PATH = "/fitkit/store"

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}{self.PATH}"

    def write(self, port: int, token: str) -> None:
        # No urllib: it would ask the proxy that HTTP_PROXY names.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.connect()
            # This host's address on the way to the server, which all workers reach.
            local_address = connection.sock.getsockname()[0]
            connection.request("PUT", self.PATH, body=str(Address(local_address, port, token)))
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ConfigurationError(self._unusable(str(error))) from error
        finally:
            connection.close()
        if status != 200:
            raise ConfigurationError(self._unusable(f"status {status}"))

    def read(self) -> Address | None:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        try:
            connection.request("GET", self.PATH)
            response = connection.getresponse()
            return Address.parse(response.read().decode()) if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def remove(self) -> None:
        """Nothing: the server ends with the job, and DELETE means something else to it."""

    def _unusable(self, reason: str) -> str:
        return (
            f"rank 0 couldn't write its address to {self} ({reason}). Set MASTER_ADDR and "
            "MASTER_PORT for all processes."
        )


SharedAddress = AddressFile | AddressOnServer
"""Where rank 0 writes the port of its store, and the others read its address; None until then."""


def launch_name(environment: Environment) -> str:
    """Return a name that the processes of one launch share, and no other launch here has.

    Open MPI gives one; of the others, all processes descend from one that the launcher keeps
    on each node, the nearest without a rank. (The parent may be a shell of the process's own.)
    """
    namespace = environment.get("PMIX_NAMESPACE", "").strip()
    name = namespace or process_name(_nearest_without("PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    # Hashed too: names differ that have lost other characters.
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9]+', '-', name)[:60]}-{digest}"


def _nearest_without(*variables: str) -> int:
    """Return the nearest ancestor that was started without these variables, or can't be looked
    at.
    """
    process = os.getppid()
    marks = [f"{name}=".encode() for name in variables]
    while process > 1:
        try:
            entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(entry.startswith(mark) for entry in entries for mark in marks):
                break
            process = parent_of(process)
        except OSError:  # Another user's process, or a system without /proc.
            break
    return process
