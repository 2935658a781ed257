"""Which rank this process is, and whether it is inside a call of several ranks."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fitkit.distributed.cluster import Cluster
from fitkit.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the ranks of a run.

    Attributes:
        rank: among all ranks, from 0.
        size: how many ranks there are.
        local_rank: among the ranks of this node.
        node_rank: this node among the nodes.
        num_nodes: how many nodes there are.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1

    @classmethod
    def of(cls, cluster: Cluster) -> World:
        """Return the place that a launcher gave this process."""
        return cls(
            cluster.rank,
            cluster.world_size,
            cluster.local_rank,
            cluster.node_rank,
            cluster.num_nodes,
        )


_own_group: Any = None
"""The process group that fitkit made for a call; any other is the script's own."""
_abandoned = False
"""Whether this process hangs in a group that it tried to leave."""


def note_own_group(group: Any) -> None:
    """Note the process group that was made for a call; None when it is left."""
    global _own_group
    _own_group = group


def abandon() -> None:
    """Count on the process group no more: leaving it hangs."""
    global _abandoned
    _abandoned = True


def is_abandoned() -> bool:
    """Whether this process hangs in a group that it tried to leave."""
    return _abandoned


def in_own_group() -> bool:
    """Whether this process is in a group that `enter` made: it is inside a call."""
    if _own_group is None or _abandoned:
        return False
    return bool(dist.is_initialized() and dist.group.WORLD is _own_group)


def users_store() -> Store | None:
    """Return the store of a group that the script made itself; None where there is none."""
    if dist.is_initialized() and not in_own_group() and not _abandoned:
        store: Store = dist.distributed_c10d._get_default_store()
        return store
    return None


def users_cluster() -> Cluster | None:
    """Return this process's place in a group that the script made itself, on one node."""
    if users_store() is None:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    text = os.environ.get("LOCAL_RANK", "").strip()
    if text and not (re.fullmatch("[0-9]{1,6}", text) and int(text) < size):
        raise ConfigurationError(
            f"LOCAL_RANK={text!r} must be a whole number below {size}, the size of the script's "
            "process group."
        )
    local = int(text or rank)
    return Cluster("torchrun", rank, local, size, size, 0, 1)
