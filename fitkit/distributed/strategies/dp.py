"""Data parallelism within one process: a batch divided among devices, outputs gathered."""

from __future__ import annotations

import torch

from fitkit.distributed.replicas import Replicas
from fitkit.distributed.strategies.base import Strategy
from fitkit.distributed.wrapped_model import WrappedModel


class DP(Strategy):
    """One process; each batch is divided among the devices, and the outputs come together again.

    Every call of a step copies the module to the devices, runs the copies (on GPUs in threads) with
    a part of the batch each, and gathers what they return on the first device: tensors joined along
    dimension 0, scalars as a vector with one entry a replica. A `*_step_end` hook sees the whole
    batch, so that a loss over all of its samples (in-batch negatives) is what one device would
    compute. One backward pass gives one device's gradients; one optimizer makes the update.

    On CPU the replicas share the device, and run one after the other. `ddp` is faster on several
    GPUs: it copies no module and no outputs, and Python's lock doesn't hold its processes up.

    A metric of torchmetrics that a step updates counts what all replicas saw. Other state that a
    step sets on the module is lost, but for the buffers of the first replica; a warning says so.

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
