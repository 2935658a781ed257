"""DDP whose ranks share the optimizer's state among them (ZeRO's first stage)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.distributed.costs import Costs, Sizes, all_gather
from fitkit.distributed.spread.optimizer import OptimizerShards
from fitkit.distributed.strategies.ddp import DDP
from fitkit.errors import warn


class DDPSharded(DDP):
    """As `DDP`, but each rank keeps the optimizer's state of a part of the parameters only.

    Each rank updates its part and sends the others the new numbers. The weights are those of
    `DDP`; the state takes 1/n of its memory on each of n ranks (as far as whole parameters can be
    dealt out evenly). After the training the optimizer is whole again.

    Where a training is cut by an error the states of the other ranks' parts are lost: the
    optimizer begins anew then, with a warning, as a checkpoint would let it go on.

    Args: as for `DDP`.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054.
    """

    name = "ddp_sharded"
    starts = "workers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shards: list[OptimizerShards] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_shards": []}

    def costs(self, module: torch.nn.Module, sizes: Sizes, devices: int, nodes: int) -> Costs:
        ranks = devices * nodes
        plain = super().costs(module, sizes, devices, nodes)
        return dataclasses.replace(
            plain,
            optimizer=sizes.optimizer / ranks,
            sent=plain.sent + all_gather(sizes.gradients, ranks),  # the updated parameters
        )

    def begin_training(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        if self.collectives.world_size == 1:
            return
        for optimizer in optimizers:
            self._shards.append(OptimizerShards(optimizer, self.collectives, self.device))

    def end_training(self) -> None:
        while self._shards:
            self._shards[-1].end(wanted=self.keeps_model)
            self._shards.pop()

    def finish(self) -> None:
        super().finish()
        shards, self._shards = self._shards, []
        lost = [shard.abandon() for shard in shards]
        if any(lost) and self.world.rank == 0:
            warn(
                "The training was cut while the optimizer's state was spread over the ranks: the "
                "optimizer begins anew, without its state. To go on as if nothing had happened, "
                "write fit(…, resume_from=…) with a checkpoint."
            )
