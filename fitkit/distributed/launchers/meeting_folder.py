"""Where the ranks that one process starts meet: files that no other user can reach.

A TCPStore would listen at a port. Anyone who connects to it could read and replace all messages by
which the ranks find each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from fitkit.distributed.cluster import Cluster, Environment, LaunchVariables
from fitkit.errors import ConfigurationError, WorkerError


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


class SharedAddress(Protocol):
    """Where rank 0 writes an address and the others read it."""

    def write(self, port: int, token: str) -> None:
        """Write the port of a store on this host."""

    def read(self) -> Address | None:
        """Read what was written, or None yet."""

    def remove(self) -> None:
        """Remove it."""


def shared_address(cluster: Cluster, environment: Environment) -> SharedAddress:
    """What a cluster without an address can use.

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


def private_folder() -> Path:
    """This user's own folder for short-lived files; nobody else can read or plant one.

    Raises:
        ConfigurationError: someone else has made a folder of that name.
    """
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = Path(tempfile.gettempdir()) / f"fitkit-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise ConfigurationError(
            f"{folder} must belong to this user and be closed to others (mode 0700). Remove it, "
            "or set TMPDIR to another folder."
        )
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a folder that this user alone can look into; always, where none has owners."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.getuid()


def launch_name(environment: Environment) -> str:
    """A name that the processes of one launch share, and no other launch here has.

    Open MPI gives one; of the others, all processes descend from one that the launcher keeps
    on each node, the nearest without a rank. (The parent may be a shell of the process's own.)
    """
    namespace = environment.get("PMIX_NAMESPACE", "").strip()
    name = namespace or process_name(_nearest_without("PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    # Hashed too: names differ that have lost other characters.
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9]+', '-', name)[:60]}-{digest}"


def _nearest_without(*variables: str) -> int:
    """The nearest ancestor that was started without these variables, or can't be looked at."""
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


def process_name(process: int) -> str:
    """A process's number and when it started: numbers are used again."""
    try:
        return f"{process}-{_status(process)[19]}"
    except (OSError, IndexError):
        return str(process)


def parent_of(process: int) -> int:
    """The process that started another; an OSError where that can't be looked at."""
    return int(_status(process)[1])


def _status(process: int) -> list[str]:
    """The fields of /proc/N/stat after the name, which may hold blanks: state, parent, …"""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


if sys.platform != "win32":
    import fcntl

NEW_S = 60.0
"""A folder of that age is locked by its owner, or has none."""
LOST_S = 30.0
"""How long torch looks for a store's file where that has been removed."""


class MeetingFolder:
    """A folder of this user's with a store for each call.

    Args:
        path: of a folder that `make` has made, in this process or another.

    Attributes:
        calls: how many have begun, of those that `next_store` counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: int = 0
        self._lock: IO[str] | None = None

    @classmethod
    def make(cls) -> MeetingFolder:
        """A new one, to be removed by this process.

        Raises:
            ConfigurationError: files can't be locked there.
        """
        parent = private_folder()
        _remove_abandoned(parent)
        made = cls(parent / f"ranks-{process_name(os.getpid())}-{secrets.token_hex(8)}")
        made.path.mkdir(mode=0o700)
        try:
            made._lock = (made.path / "lock").open("w")
            if sys.platform != "win32":
                fcntl.flock(made._lock, fcntl.LOCK_EX)
            made.store(0).set("made", "")
        except (OSError, RuntimeError) as error:
            made.remove()
            raise ConfigurationError(
                f"The ranks can't exchange files in {parent} ({str(error).splitlines()[0]}). Set "
                "TMPDIR to a folder on a local disk with free space."
            ) from error
        return made

    def store(self, call: int) -> Store:
        """The store of a call, or 0 for that of all calls."""
        store = FileStore(str(self.path / str(call)), -1)
        store.set_timeout(timedelta(seconds=LOST_S))
        return store

    def next_store(self) -> Store:
        """The store of the next call, where each process counts its calls.

        Raises:
            WorkerError: the folder has gone with the process that made it.
        """
        self.calls += 1
        if self._lock is not None and self.calls > 2:
            # All ranks have come to the call before this one, so they have left the one before
            # that; in the store of the last call they may still read what rank 0 has done since.
            (self.path / str(self.calls - 2)).unlink(missing_ok=True)
        if not self.path.is_dir():
            raise WorkerError("Rank 0's process has ended.")
        return self.store(self.calls)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes that were killed have left there: nobody holds its lock."""
    if sys.platform == "win32":
        return
    for folder in parent.glob("ranks-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > NEW_S:
                with (folder / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
