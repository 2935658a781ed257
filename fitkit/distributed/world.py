"""Which rank this process is, and how it enters and leaves the process group."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fitkit.distributed.collectives import Collectives, ProcessGroup, Solo


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
    if dist.is_initialized():
        return ProcessGroup(device), False
    if world.size == 1 and store is None:
        return Solo(), False
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        chosen, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    return ProcessGroup(device), True


def leave() -> None:
    """Leave the process group, without waiting for ranks that may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()
