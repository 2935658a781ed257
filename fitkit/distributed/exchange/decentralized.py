"""Bagua's `decentralized`: ranks step by their own gradients, and average weights with peers."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from fitkit.arguments import check_choice, check_count
from fitkit.distributed.costs import all_reduce
from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.compression import decode, encode, wire_bytes
from fitkit.distributed.exchange.peers import Peers
from fitkit.distributed.precision import Precision
from fitkit.errors import ConfigurationError


class Decentralized(Exchange):
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
        check_choice("peer_selection_mode", peer_selection_mode, ("all", "shift_one"))
        check_count("communication_interval", communication_interval)
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def check(self, size: int, precision: Precision, device: torch.device) -> None:
        if self.peer_selection_mode == "shift_one" and size > 1 and size % 2:
            raise ConfigurationError(
                f"peer_selection_mode='shift_one' pairs the ranks up, but there are {size}. Use "
                "an even number of devices, or peer_selection_mode='all'."
            )

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        each = all_reduce(size, ranks) if self.peer_selection_mode == "all" else size
        return each / self.communication_interval

    @property
    def averages_gradients(self) -> bool:
        return False

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
    """The rank in the other half that a rank meets in a round; it moves on by one each round."""
    half = size // 2
    if rank < half:
        return half + (rank + round_number) % half
    return (rank - half - round_number) % half


class LowPrecisionDecentralized(Exchange):
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

    _own: torch.Tensor
    _replicas: list[torch.Tensor]
    _neighbours: list[int]

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return wire_bytes(numbers) * len(neighbours(0, ranks))

    def begin(
        self,
        peers: Peers,
        parameters: list[torch.nn.Parameter],
        optimizers: list[Optimizer],
        updates: int,
    ) -> None:
        super().begin(peers, parameters, optimizers, updates)
        self._neighbours = neighbours(peers.rank, peers.size)
        self.settled(parameters)

    @property
    def averages_gradients(self) -> bool:
        return False

    def settled(self, parameters: list[torch.nn.Parameter]) -> None:
        super().settled(parameters)
        self._own = self._weights.read()
        self._replicas = [self._own.clone() for _ in self._neighbours]

    def after_update(self) -> None:
        self._updates += 1
        own, replicas = self._own, self._replicas
        step = self._weights.read() - own
        mean = torch.stack([own, *replicas]).mean(0)
        wire = encode((mean + step - own)[None])
        for replica, received in zip(
            replicas, self._peers.swap(wire, self._neighbours), strict=True
        ):
            replica += decode(received, len(own), own.dtype)[0]
        own += decode(wire, len(own), own.dtype)[0]
        self._weights.write(own)


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks before and after a rank on the ring; one of them where there are two ranks."""
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
