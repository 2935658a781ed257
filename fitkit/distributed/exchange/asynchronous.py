"""Bagua's `async`: weights are averaged in the background while each rank goes on learning."""

from __future__ import annotations

import time

import torch
from torch.optim import Optimizer

from fitkit.arguments import check_count, check_number
from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.peers import Peers, Sum


class Asynchronous(Exchange):
    """From time to time a copy of the weights is averaged over the ranks, while they go on.

    When the mean is there, its difference to the copy is added to the weights, so that what was
    learned meanwhile isn't lost. The exchange has a process group of its own and is carried out
    by that group's thread; weights change between updates only. No rank waits for others but at
    epochs' ends, evaluations and saves, where all end the rounds that any of them has begun.

    Args:
        sync_interval_ms: milliseconds from one round's beginning to the next's, at least.
        warmup_steps: updates with the exact mean of gradients, before the ranks part.

    Reference: Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, 2021,
    arXiv:2107.01499 (asynchronous model averaging).
    """

    name = "async"
    keeps_apart = True

    _own: Peers | None = None
    _sum: Sum | None = None
    _copy: torch.Tensor
    _total: torch.Tensor
    _rounds = 0
    _began_s = 0.0

    def __init__(self, sync_interval_ms: float = 500.0, warmup_steps: int = 0) -> None:
        check_number("sync_interval_ms", sync_interval_ms, minimum=0)
        check_count("warmup_steps", warmup_steps, minimum=0)
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps
        self.wraps = warmup_steps > 0

    def begin(
        self,
        peers: Peers,
        parameters: list[torch.nn.Parameter],
        optimizers: list[Optimizer],
        updates: int,
    ) -> None:
        super().begin(peers, parameters, optimizers, updates)
        self._own = peers.apart()
        self._sum, self._rounds, self._began_s = None, 0, time.monotonic()

    @property
    def averages_gradients(self) -> bool:
        return self._updates < self.warmup_steps

    def after_update(self) -> None:
        self._updates += 1
        if self._updates <= self.warmup_steps:
            return
        if self._sum is not None:
            if not self._sum.is_completed():
                return
            self._take()
        if (time.monotonic() - self._began_s) * 1000 >= self.sync_interval_ms:
            self._begin_round()

    def settle(self) -> None:
        # A round ends when all ranks have begun it, and none can be ahead by more than one.
        rounds = max(self._peers.gather(self._rounds))
        while self._rounds < rounds:
            self._take()
            self._begin_round()
        self._take()

    def end(self) -> None:
        # Not waited for: after a failure the others may not come. The strategy leaves the group.
        self._sum = None

    def leave(self) -> None:
        """Leave the group of its own."""
        own, self._own = self._own, None
        if own is not None:
            own.leave()

    def _begin_round(self) -> None:
        assert self._own is not None, "begin comes first"
        self._copy = self._weights.read()
        self._total = self._copy.clone()
        self._rounds += 1
        self._began_s = time.monotonic()
        self._sum = self._own.begin_sum(self._total)

    def _take(self) -> None:
        """Take the mean of the round that is under way, if any."""
        found, self._sum = self._sum, None
        if found is not None:
            found.wait()
            self._weights.add(self._total.div_(self._peers.size).sub_(self._copy))
