"""Data parallelism in one process: each batch is split over the devices, outputs are gathered."""

from __future__ import annotations

import torch

from fitkit.distributed.replicas import Replicas
from fitkit.distributed.strategies.base import Strategy
from fitkit.distributed.wrapped_model import WrappedModel


class DP(Strategy):
    """Trains in one process: each batch is split over the devices, and the outputs are gathered.

    Each call of a step copies the module to the devices and runs the copies with a part of the
    batch each (on GPUs in threads). What they return is gathered on the first device: tensors are
    joined along dimension 0, scalars become a vector with one entry per replica. A `*_step_end`
    hook sees the whole batch. A loss over all of its samples (such as in-batch negatives) is
    therefore the same as on one device. One backward pass gives one device's gradients, and one
    optimizer makes the update.

    On CPU the replicas share the device and run one after the other. On several GPUs, `ddp` is
    faster: it copies no module and no outputs, and Python's lock doesn't hold up its processes.

    A torchmetrics metric that a step updates counts what all replicas saw. Other state that a step
    sets on the module is lost, except for the buffers of the first replica. A warning says so.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.DPStrategy())
    """

    name = "dp"
    replicates = True

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        return Replicas(module, self.devices, self.name, self._warned)
