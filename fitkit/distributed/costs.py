"""What a strategy costs a device in memory and a step in traffic: the arithmetic."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a training of a whole net holds, in bytes.

    Attributes:
        parameters: all of them.
        gradients: of those that learn.
        optimizer: its state, once an update was made.
        buffers: running statistics and the like.
        activations: what forward keeps for backward, of the batch that one process reads.
        numbers: how many numbers learn.
        element: bytes of one of these where they travel in half precision, else their own.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    numbers: int
    element: float = 4.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the fullest device holds, in bytes, and what a rank sends in a step.

    Attributes:
        parameters, gradients, optimizer, buffers, activations: as in `Sizes`, of this device.
        exchange: buffers in which gradients or parameters travel.
        sent: bytes that a rank sends for each update.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    exchange: float = 0.0
    sent: float = 0.0

    @property
    def memory(self) -> float:
        """All that the device holds."""
        held = (self.parameters, self.gradients, self.optimizer, self.buffers)
        return sum(held) + self.activations + self.exchange


def whole(sizes: Sizes) -> Costs:
    """The costs of a device that holds everything and sends nothing."""
    return Costs(
        sizes.parameters, sizes.gradients, sizes.optimizer, sizes.buffers, sizes.activations
    )


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes.

    Reference: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    return 2 * all_gather(size, ranks)


def all_gather(size: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have `size` bytes of which each had an equal part;
    a reduce-scatter sends as many."""
    return size * (ranks - 1) / ranks
