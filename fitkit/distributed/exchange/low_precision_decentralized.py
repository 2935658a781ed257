"""Bagua's `low_precision_decentralized`: neighbours on a ring exchange compressed differences."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.byte_codec import decode, encode, wire_bytes
from fitkit.distributed.exchange.peers import Peers


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
