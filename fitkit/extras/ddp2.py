"""Data parallelism within each node, and DDP across the nodes."""

from __future__ import annotations

import torch

from fitkit.extras.ddp import DDP
from fitkit.extras.dp import Replicas
from fitkit.seams.strategies import Assignment, Strategy, WrappedModel


class DDP2(DDP):
    """Shares each batch among a node's devices, and averages gradients over the nodes.

    Within a node it works like `DP`: the batch is split over the devices and the outputs are
    gathered. `*_step_end` and the loss see the node's whole batch. A loss over all of its samples
    (such as in-batch negatives) is therefore the same as in one process. Across nodes it works like
    `DDP`. The effective batch size is `batch_size` times the number of nodes.

    Each node has one process (torchrun --nproc-per-node=1), with the node's devices as replicas in
    threads.

    Args: as for `DDP`. With `find_unused_parameters=True`, a parameter that only `*_step_end` uses
        can't learn: torch looks at the step's outputs, and takes it as unused.

    Example:
        >>> import fitkit
        >>> strategy = fitkit.strategies.DDP2Strategy()
    """

    name = "ddp2"
    starts = "nodes"
    replicates = True

    def connect(self, assignment: Assignment) -> Strategy:
        self._warned: set[str] = set()
        return super().connect(assignment)

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        return Replicas(module, self.devices, self.name, self._warned)
