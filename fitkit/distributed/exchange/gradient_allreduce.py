"""Bagua's `gradient_allreduce`: the exact mean of gradients, which is DDP itself."""

from __future__ import annotations

from fitkit.arguments import check_count
from fitkit.distributed.costs import all_reduce
from fitkit.distributed.exchange.base import Exchange


class GradientAllreduce(Exchange):
    """Gradients are averaged exactly, while the backward pass goes on.

    Reference: Gan et al., BAGUA, 2021, arXiv:2107.01499 (C_FP_S); Li et al., PyTorch
    Distributed, 2020, arXiv:2006.15704, which does the work.
    """

    name = "gradient_allreduce"


class PostLocalSGD(Exchange):
    """After a warm-up each rank steps by itself; weights are averaged every few updates.

    Args:
        warmup_steps: updates with the exact mean of gradients.
        period: updates from one averaging of weights to the next.

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2020, arXiv:1808.07217.
    """

    name = "post_local_sgd"
    keeps_apart = True

    def __init__(self, warmup_steps: int = 100, period: int = 4) -> None:
        check_count("warmup_steps", warmup_steps, minimum=0)
        check_count("period", period)
        self.warmup_steps = warmup_steps
        self.period = period
        self.wraps = warmup_steps > 0

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return all_reduce(size, ranks) / self.period

    @property
    def averages_gradients(self) -> bool:
        return self._updates < self.warmup_steps

    def after_update(self) -> None:
        self._updates += 1
        local = self._updates - self.warmup_steps
        if local > 0 and local % self.period == 0:
            weights = self._weights.read()
            self._peers.mean(weights)
            self._weights.write(weights)
