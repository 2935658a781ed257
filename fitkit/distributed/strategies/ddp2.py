"""Data parallelism within each node, and DDP across the nodes."""

from __future__ import annotations

import torch

from fitkit.distributed.launchers import InlineLauncher
from fitkit.distributed.launchers.ranks import RankLauncher
from fitkit.distributed.replicas import Replicas
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.ddp import DDP
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import WrappedModel


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

    Example:
        >>> import fitkit
        >>> strategy = fitkit.strategies.DDP2Strategy()
    """

    name = "ddp2"
    starts = "nodes"
    replicates = True

    def connect(self, assignment: Assignment) -> Strategy:
        Strategy.connect(self, assignment)
        cluster = assignment.cluster
        self.world: World = World() if cluster is None else World.of(cluster)
        self._warned: set[str] = set()
        if cluster is None or cluster.world_size == 1:
            self.launcher: InlineLauncher | RankLauncher = InlineLauncher()
        else:
            self.launcher = RankLauncher(self, cluster)
        return self

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        return Replicas(module, self.devices, self.name, self._warned)
