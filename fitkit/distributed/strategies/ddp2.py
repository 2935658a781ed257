"""Data parallelism within each node, and DDP across the nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from fitkit.distributed.agreement import check_agreement
from fitkit.distributed.assignment import Assignment
from fitkit.distributed.cluster import Cluster
from fitkit.distributed.collectives import Collectives, NodeShares
from fitkit.distributed.costs import Costs, Sizes
from fitkit.distributed.launchers import InlineLauncher
from fitkit.distributed.launchers.existing import ExistingLauncher
from fitkit.distributed.node_rows import Node, NodeDoor
from fitkit.distributed.replicas import Replicas
from fitkit.distributed.router import Door
from fitkit.distributed.strategies.base import Strategy
from fitkit.distributed.strategies.ddp import DDP
from fitkit.distributed.world import World


class DDP2(DDP):
    """A node's devices share a batch, and gradients are averaged over the nodes.

    Within a node it is as under `DP`: the batch is divided among the devices, the outputs come
    together, and `*_step_end` and the loss see the node's whole batch, so that a loss over all of
    its samples (in-batch negatives) is what one process would compute of it. Across nodes it is
    as under `DDP`. The effective batch is `batch_size` times the number of nodes.

    There are two ways to start it: one process a node (torchrun --nproc-per-node=1), which has
    the node's devices as replicas in threads; or one process a device
    (--nproc-per-node=<devices>), which is faster, and whose steps may set state on the module.
    In the second way each process reads the node's whole batch and computes its rows.

    Args: as for `DDP`. With `find_unused_parameters=True` a parameter that only `*_step_end` uses
        can't learn: torch takes it for unused, since it looks at the step's outputs.
    """

    name = "ddp2"
    starts = "here"
    replicates = True

    _divides = False  # whether each device of a node has a process
    _node: Node | None = None
    _shares: Collectives | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_node": None, "_shares": None}

    def costs(self, module: torch.nn.Module, sizes: Sizes, devices: int, nodes: int) -> Costs:
        # One process a device sends the same as DDP over all devices, at most.
        within = dataclasses.replace(sizes, activations=sizes.activations / devices)
        return super().costs(module, within, devices, nodes)

    def check_launch(self, cluster: Cluster, devices: int | None, num_nodes: int | None) -> None:
        # Both numbers are the same on every rank, so that all of them take it the same way.
        once = cluster.world_size == cluster.num_nodes
        each = cluster.local_world_size if devices is None else devices
        check_agreement(cluster, 1 if once else each, num_nodes)

    def connect(self, assignment: Assignment) -> Strategy:
        Strategy.connect(self, assignment)
        cluster = assignment.cluster
        self.world = World() if cluster is None else World.of(cluster)
        self._warned: set[str] = set()
        self._divides = cluster is not None and cluster.world_size > cluster.num_nodes
        if cluster is None or cluster.world_size == 1:
            self.launcher = InlineLauncher()
        else:
            self.launcher = ExistingLauncher(self, cluster)
        return self

    @property
    def shares(self) -> Collectives:
        return self.collectives if self._shares is None else self._shares

    @property
    def share_count(self) -> int:
        return self.world.num_nodes

    @property
    def replicas(self) -> int:
        return 1 if self._divides else len(self.devices)

    # ------------------------------------------------------------------ the ranks

    def join(self, store: Store | None = None) -> None:
        super().join(store)
        if self._divides:
            nodes = _by_node(self.collectives.gather(self.world.node_rank))
            self._shares = NodeShares(self.collectives, nodes)
            self._node = Node(nodes, self.collectives.rank, self.device, self.timeout)

    def leave(self) -> None:
        node, self._node, self._shares = self._node, None, None
        if node is not None:
            node.leave()
        super().leave()

    # ------------------------------------------------------------------ the module

    def door(self, module: torch.nn.Module) -> Door:
        if self._node is None:
            return self.wrapping(self.plain_door(module))
        return NodeDoor(self.wrapping(Door(module)), self._node)

    def plain_door(self, module: torch.nn.Module) -> Door:
        if self._node is None:
            return Replicas(module, self.devices, self.name, self._warned)
        return NodeDoor(Door(module), self._node)


def _by_node(node_ranks: list[int]) -> list[list[int]]:
    """The ranks of each node, from each rank's node."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_ranks):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())
