"""Data parallelism within each node, and DDP across the nodes."""

from __future__ import annotations

import dataclasses

import torch

from fitkit.distributed.cluster import Cluster, check_agreement, check_one_process_a_node
from fitkit.distributed.costs import Costs, Sizes
from fitkit.distributed.launchers import InlineLauncher
from fitkit.distributed.launchers.existing import ExistingLauncher
from fitkit.distributed.replicas import Replicas
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.ddp import DDP
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import Door


class DDP2(DDP):
    """A node's devices share a batch, and gradients are averaged over the nodes.

    Within a node it is as under `DP`: the batch is divided among the devices, the outputs come
    together, and `*_step_end` and the loss see the node's whole batch, so that a loss over all of
    its samples (in-batch negatives) is what one process would compute of it. Across nodes it is
    as under `DDP`. The effective batch is `batch_size` times the number of nodes.

    A node has one process (torchrun --nproc-per-node=1), with the node's devices as replicas in
    threads.

    Args: as for `DDP`. With `find_unused_parameters=True` a parameter that only `*_step_end` uses
        can't learn: torch takes it for unused, since it looks at the step's outputs.
    """

    name = "ddp2"
    starts = "here"
    replicates = True

    def costs(self, module: torch.nn.Module, sizes: Sizes, devices: int, nodes: int) -> Costs:
        within = dataclasses.replace(sizes, activations=sizes.activations / devices)
        return super().costs(module, within, 1, nodes)

    def check_launch(self, cluster: Cluster, devices: int | None, num_nodes: int | None) -> None:
        check_one_process_a_node(cluster, self.name)
        check_agreement(cluster, 1, num_nodes)

    def connect(self, assignment: Assignment) -> Strategy:
        Strategy.connect(self, assignment)
        cluster = assignment.cluster
        self.world = World() if cluster is None else World.of(cluster)
        self._warned: set[str] = set()
        if cluster is None or cluster.world_size == 1:
            self.launcher = InlineLauncher()
        else:
            self.launcher = ExistingLauncher(self, cluster)
        return self

    @property
    def replicas(self) -> int:
        return len(self.devices)

    # ------------------------------------------------------------------ the module

    def door(self, module: torch.nn.Module) -> Door:
        return self.wrapping(self.plain_door(module))

    def plain_door(self, module: torch.nn.Module) -> Door:
        return Replicas(module, self.devices, self.name, self._warned)
