"""Ways in which ranks keep together that send plain numbers: gradients, or weights among peers."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.errors import ConfigurationError
from fitkit.extras.bagua.base import Algorithm, Peers, all_reduce_bytes
from fitkit.extras.bagua.compression import decode, encode, wire_bytes
from fitkit.seams.precisions import Precision


class GradientAllreduce(Algorithm):
    """Gradients are averaged exactly, during the backward pass.

    Reference: Gan et al., BAGUA, 2021, arXiv:2107.01499 (C_FP_S); Li et al., PyTorch
    Distributed, 2020, arXiv:2006.15704, which does the work.
    """

    name = "gradient_allreduce"


class PostLocalSGD(Algorithm):
    """After a warm-up each rank steps by itself; weights are averaged every few updates.

    Args:
        warmup_steps: updates with the exact mean of gradients.
        period: updates from one averaging of weights to the next.

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2020, arXiv:1808.07217.
    """

    name = "post_local_sgd"
    keeps_apart = True

    def __init__(self, warmup_steps: int = 100, period: int = 4) -> None:
        warmup_steps = check_count("warmup_steps", warmup_steps, minimum=0)
        period = check_count("period", period)
        self.warmup_steps = warmup_steps
        self.period = period
        self.wraps: bool = warmup_steps > 0

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return all_reduce_bytes(size, ranks) / self.period

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


class Decentralized(Algorithm):
    """After an update weights are averaged with peers; gradients stay where they are.

    Args:
        peer_selection_mode: `"all"` averages over all ranks; `"shift_one"` over pairs, one from
            each half of the ranks, which change each time: less traffic, and an even number of
            ranks is needed.
        communication_interval: updates from one averaging to the next.

    Reference: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, 2017,
    arXiv:1705.09056; Gan et al., BAGUA, 2021, arXiv:2107.01499 (D_FP_S).
    """

    name = "decentralized"
    keeps_apart = True
    wraps = False

    def __init__(self, peer_selection_mode: str = "all", communication_interval: int = 1) -> None:
        peer_selection_mode = check_choice(
            "peer_selection_mode", peer_selection_mode, ("all", "shift_one")
        )
        communication_interval = check_count("communication_interval", communication_interval)
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def check(self, size: int, precision: Precision, device: torch.device) -> None:
        if self.peer_selection_mode == "shift_one" and size > 1 and size % 2:
            raise ConfigurationError(
                f"peer_selection_mode='shift_one' pairs the ranks up, but there are {size}. Use "
                "an even number of devices, or peer_selection_mode='all'."
            )

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        each = all_reduce_bytes(size, ranks) if self.peer_selection_mode == "all" else size
        return each / self.communication_interval

    def after_update(self) -> None:
        self._updates += 1
        if self._updates % self.communication_interval:
            return
        peers, weights = self._peers, self._weights.read()
        if self.peer_selection_mode == "all":
            peers.mean(weights)
        else:
            round_number = self._updates // self.communication_interval
            (other,) = peers.swap(weights, [shifted_peer(peers.rank, peers.size, round_number)])
            weights.add_(other).div_(2)
        self._weights.write(weights)


def shifted_peer(rank: int, size: int, round_number: int) -> int:
    """Return the rank in the other half that a rank meets in a round; it moves on by one each
    round.
    """
    half = size // 2
    if rank < half:
        return half + (rank + round_number) % half
    return (rank - half - round_number) % half


class LowPrecisionDecentralized(Algorithm):
    """Each rank tells its two neighbours by how much its weights change, in 8-bit numbers.

    It keeps a replica of each neighbour's weights, which those differences keep in step: the
    neighbour takes its own compressed difference too, and so both hold the same numbers. The
    target of an update is the rank's own step from the mean of itself and its neighbours.

    Reference: Tang et al., Communication Compression for Decentralized Training, 2018,
    arXiv:1803.06443 (DCD-PSGD); Gan et al., BAGUA, 2021, arXiv:2107.01499 (D_LP_S).
    """

    name = "low_precision_decentralized"
    keeps_apart = True
    wraps = False

    _local: torch.Tensor
    _replicas: list[torch.Tensor]
    _neighbours: list[int]

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return wire_bytes(numbers) * len(neighbours(0, ranks))

    def resume(self, parameters: list[torch.nn.Parameter]) -> None:
        super().resume(parameters)
        self._neighbours = neighbours(self._peers.rank, self._peers.size)
        self._local = self._weights.read()
        self._replicas = [self._local.clone() for _ in self._neighbours]

    def after_update(self) -> None:
        self._updates += 1
        local, replicas = self._local, self._replicas
        step = self._weights.read() - local
        mean = torch.stack([local, *replicas]).mean(0)
        wire = encode((mean + step - local)[None])
        for replica, received in zip(
            replicas, self._peers.swap(wire, self._neighbours), strict=True
        ):
            replica += decode(received, len(local), local.dtype)[0]
        local += decode(wire, len(local), local.dtype)[0]
        self._weights.write(local)


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks before and after a rank on the ring; one of them where there are two
    ranks.
    """
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


class Asynchronous(Algorithm):
    """From time to time a copy of the weights is averaged over the ranks, during training.

    When the mean arrives, its difference to the copy is added to the weights, so that nothing
    learned in between is lost. The exchange has its own process group, whose thread runs it.
    Weights change between updates only. Ranks wait for each other only at the ends of epochs,
    evaluations and saves, where all finish the rounds that any of them has begun.

    Args:
        sync_interval_ms: the least number of milliseconds between the starts of two rounds.
        warmup_steps: the number of first updates with the exact mean of gradients.

    Reference: Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, 2021,
    arXiv:2107.01499 (asynchronous model averaging).
    """

    name = "async"
    keeps_apart = True

    _peers_apart: Peers | None = None
    _sum: Any = None  # torch's `Work`, while a round is under way
    _copy: torch.Tensor
    _total: torch.Tensor
    _rounds = 0
    _began_s = 0.0

    def __init__(self, sync_interval_ms: float = 500.0, warmup_steps: int = 0) -> None:
        sync_interval_ms = check_number("sync_interval_ms", sync_interval_ms, minimum=0)
        warmup_steps = check_count("warmup_steps", warmup_steps, minimum=0)
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps
        self.wraps: bool = warmup_steps > 0

    def begin(
        self,
        peers: Peers,
        parameters: list[torch.nn.Parameter],
        optimizers: list[Optimizer],
        updates: int,
    ) -> None:
        super().begin(peers, parameters, optimizers, updates)
        self._peers_apart = peers.apart()
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

    def flush(self) -> None:
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
        apart, self._peers_apart = self._peers_apart, None
        if apart is not None:
            apart.leave()

    def _begin_round(self) -> None:
        assert self._peers_apart is not None, "begin comes first"
        self._copy = self._weights.read()
        self._total = self._copy.clone()
        self._rounds += 1
        self._began_s = time.monotonic()
        self._sum = self._peers_apart.begin_sum(self._total)

    def _take(self) -> None:
        """Take the mean of the round that is under way, if any."""
        found, self._sum = self._sum, None
        if found is not None:
            found.wait()
            self._weights.add(self._total.div_(self._peers.size).sub_(self._copy))
