"""How a rank enters the process group of a call, and leaves it."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Store

from fitkit.accelerators import backends_for
from fitkit.errors import WorkerError
from fitkit.extras.launchers.process_group import ProcessGroup, agree_on_key
from fitkit.extras.launchers.stores import PromptStore, meets_by_files
from fitkit.seams.launchers import in_own_group, is_abandoned, note_own_group
from fitkit.seams.strategies import Collectives, Solo, World

NCCL_FAILURES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""The variable that says what NCCL's watchdog does about a rank that has gone."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that says at which of a machine's addresses gloo's connections are made."""


_connections: set[tuple[int, int]] = set()
"""The connections of the group that `enter` made: file numbers and inodes."""
_group_store: PromptStore | None = None
"""Its store."""
_variables: dict[str, str | None] = {}
"""What environment variables were before the group was made; None for those that weren't there."""


def enter(
    world: World,
    device: torch.device,
    store: Store | None,
    backend: str | None,
    timeout: timedelta | None,
) -> tuple[Collectives, bool]:
    """Join the process group.

    Args:
        store: where the ranks meet; None for torch's `env://`.
        backend: None for NCCL on CUDA and gloo elsewhere.
        timeout: bound of each exchange; None for torch's default.

    Returns:
        The collectives, and whether the group was made here (and is to be left again).

    Ranks:
        Collective: returns when all have come, or fails after `timeout`.
    """
    global _group_store
    if is_abandoned():
        raise WorkerError(
            "This process is still in the process group of a call that failed. Start it again."
        )
    if dist.is_initialized():
        if store is not None:
            agree_on_key(store, world.rank)
        return ProcessGroup(device), False
    if world.size == 1 and store is None:
        return Solo(), False
    # Its functions have the group of the moment of their import as default (torch 2.13), and would
    # keep this one, and gloo's connections, for ever. DDP imports it.
    importlib.import_module("torch.distributed.nn")
    chosen = backend or backends_for(device)
    is_local = meets_by_files(store)
    meeting = None if store is None else PromptStore(store, world.size)
    if is_local or (world.num_nodes == 1 and not os.environ.get(INTERFACE)):
        _stay_on_this_machine()
    hook = sys.excepthook
    _connections.clear()
    try:
        if meeting is not None:
            _group_store = meeting
            meeting.set_timeout(timeout or default_pg_timeout)
        agree_on_key(meeting, world.rank)
        if store is not None and "nccl" in chosen and NCCL_FAILURES not in os.environ:
            # Abort the exchange. torch's default ends the process, which is rank 0's: the user's.
            _set_until_left(NCCL_FAILURES, "2")
        # NCCL's threads ask their store at all times, which Python's isn't for. Gloo beside it has
        # torch's own, too: nothing ends its wait there for a rank that never comes.
        given = meeting if chosen == "gloo" else store
        if meeting is not None and given is not meeting:
            meeting.wait_for_all()
        # Without device_id: NCCL would start in here, where nothing ends it if a rank is missing,
        # and barriers would be NCCL's. Each verb makes its device the current one.
        with counting_connections():
            dist.init_process_group(
                chosen, store=given, rank=world.rank, world_size=world.size, timeout=timeout
            )
        note_own_group(dist.group.WORLD)
        if "gloo" in chosen:  # Else a rank that fails at once cuts what others still connect.
            dist.barrier()
    except BaseException:
        leave()
        raise
    if getattr(hook, "__name__", "") == "_distributed_excepthook":
        sys.excepthook = hook  # Else each group adds another "[rank0]: " to each line of an error.
    return ProcessGroup(device), True


def leave() -> None:
    """Leave the process group, without waiting for ranks that may be gone."""
    global _group_store
    held = _groups_of_tensors()
    if dist.is_initialized():
        dist.destroy_process_group()
        _let_go(held)
    else:  # A group that couldn't be made counts, and the next one's name must be new ranks', too.
        dist.distributed_c10d._world.group_count = 0
    while _variables:
        name, before = _variables.popitem()
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    note_own_group(None)
    _group_store = None


def place_among(size: int) -> World | None:
    """Return this process's place in the call that it is inside of, if that has so many ranks."""
    if not in_own_group() or dist.get_world_size() != size:
        return None
    return World(dist.get_rank(), size, dist.get_rank())


def _groups_of_tensors() -> list[Any]:
    """Let torch forget what it has cached for this thread's `DTensor`s.

    If another thread forks a process, as for the workers of a `DataLoader`, Python clears there
    what this thread has for itself. A group that only torch's cache holds would be destroyed in
    the forked process, where gloo's destructor can wait for threads that aren't there.

    Returns:
        The groups besides that of all ranks, which the caller lets go.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return []
    from torch.distributed.tensor import debug

    held = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    return held


def _let_go(held: list[Any]) -> None:
    """Forget groups that were destroyed.

    Gloo's destructor waits for an exchange that a failure broke, up to its timeout. A thread waits
    in its place.
    """
    if held:
        threading.Thread(target=held.clear, name="fitkit-left-group", daemon=True).start()


def _stay_on_this_machine() -> None:
    """Let gloo listen at the loopback address until `leave`; its own choice is the host name's."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loopback = next((name for name in names if name in ("lo", "lo0")), None)
    if loopback is not None:
        _set_until_left(INTERFACE, loopback)


def _set_until_left(variable: str, value: str) -> None:
    """Set an environment variable until `leave`."""
    _variables.setdefault(variable, os.environ.get(variable))
    os.environ[variable] = value


def abort() -> None:
    """End this process's exchanges; torch itself can do that with NCCL alone."""
    if _group_store is not None:
        _group_store.end_waits()
    hang_up()  # Before torch forgets the group: of gloo it ends nothing.
    if in_own_group() and "nccl" in dist.get_backend_config():
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()


def hang_up() -> None:
    """Cut gloo's connections, so that nobody waits at either end.

    Closing them, as leaving the group does, isn't enough where processes were forked meanwhile:
    DataLoader workers hold them open.
    """
    if not in_own_group():
        return
    for number, _ in _connections.intersection(_open_connections()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def counting_connections() -> Iterator[None]:
    """Let `hang_up` cut the connections that are made meanwhile, too: another group's."""
    before = _open_connections()
    yield
    _connections.update(_open_connections() - before)


class RankGroup:
    """Some of the ranks, which exchange things among themselves.

    Args:
        groups: all groups made at this moment, including those without this rank.
        rank: this rank.
        backend: `"nccl"` or `"gloo"`.
        timeout: the limit for each exchange; None for torch's default.

    Attributes:
        handle: torch's group, until `leave`. Objects that may outlive the group (graphs, an
            exception's frames) hold this object instead. gloo closes its connections only when
            nothing holds torch's group, and the other ranks see by this that the rank has left.

    Ranks:
        Collective: all ranks of the world make the same groups.
    """

    def __init__(
        self, groups: list[list[int]], rank: int, backend: str, timeout: timedelta | None
    ) -> None:
        self.handle: Any = None
        with counting_connections():
            for ranks in groups:
                made = dist.new_group(ranks, timeout=timeout, backend=backend)
                if rank in ranks:
                    self.handle = made

    def leave(self) -> None:
        """Leave the group."""
        held, self.handle = [self.handle], None
        if held[0] is not None and dist.is_initialized():
            dist.destroy_process_group(held[0])
            _let_go(held)


def _open_connections() -> set[tuple[int, int]]:
    """Return this process's TCP connections; none where the system doesn't list open files."""
    folder = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)
    numbers = [int(name) for name in os.listdir(folder)] if folder else []
    found = ((number, _inode_of_connection(number)) for number in numbers)
    return {(number, inode) for number, inode in found if inode is not None}


def _inode_of_connection(number: int) -> int | None:
    """Return the inode of an open file that is a TCP connection; None for any other."""
    try:
        about = os.fstat(number)
        if not stat.S_ISSOCK(about.st_mode):
            return None
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # It isn't connected, or has just been closed.
        return None
    return about.st_ino if is_tcp else None
