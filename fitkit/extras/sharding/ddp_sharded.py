"""DDP whose ranks shard the optimizer's state (ZeRO's first stage)."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from fitkit.errors import warn
from fitkit.extras.ddp import DDP
from fitkit.extras.sharding.sharded_optimizer import OptimizerShards
from fitkit.seams.strategies import Collectives, Engine


class DDPSharded(DDP):
    """Like `DDP`, but each rank keeps the optimizer state of only a part of the parameters.

    Each rank updates its part and sends the new values to the others. The weights are the same as
    with `DDP`. On n ranks, the state takes 1/n of its memory on each, as far as whole parameters
    can be divided evenly. After the training the optimizer is whole again.

    If an error ends the training, the states of the other ranks' parts are lost. The optimizer then
    starts over, with a warning. A checkpoint lets you continue instead.

    Args: as for `DDP`.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.DDPShardedStrategy())
    """

    name = "ddp_sharded"
    starts = "workers"

    has_engine = True

    def engine_for(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        if self.collectives.world_size == 1:
            return None
        return ShardedOptimizers(optimizers, self.collectives, self.device)


class ShardedOptimizers(Engine):
    """Lets each rank make its part of each optimizer's updates.

    Args: as for `OptimizerShards`, for several optimizers.
    """

    may_leave_out = True

    def __init__(
        self, optimizers: list[Optimizer], collectives: Collectives, device: torch.device
    ) -> None:
        self._rank = collectives.rank
        try:
            for optimizer in optimizers:
                self.in_place = (*self.in_place, OptimizerShards(optimizer, collectives, device))
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        shards = self.in_place
        super().abandon()
        if self._rank == 0 and any(isinstance(s, OptimizerShards) and s.has_lost for s in shards):
            warn(
                "The training stopped while the optimizer's state was sharded over the ranks. The "
                "optimizer starts over without its state. To continue the training exactly, "
                "write fit(…, resume_from=…) with a checkpoint."
            )
