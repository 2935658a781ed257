"""What ranks hold apart becomes one again: weights, running statistics, optimizers' states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from fitkit.distributed.collectives import Collectives
from fitkit.distributed.exchange.flat_tensors import FlatTensors
from fitkit.distributed.exchange.peers import Peers

Place = tuple[int, int, str, tuple[int, ...]]
"""Which optimizer, which of its parameters, which of that one's states, of what shape."""


def average_tensors(tensors: list[torch.Tensor], peers: Peers) -> None:
    """Replace tensors by their means.

    Ranks:
        Collective.
    """
    if tensors:
        flat = FlatTensors(tensors)
        vector = flat.read()
        peers.mean(vector)
        flat.write(vector)


def average_buffers(module: torch.nn.Module, peers: Peers, collectives: Collectives) -> None:
    """Replace running statistics by their means, and counters by rank 0's.

    Ranks:
        Collective.
    """
    buffers = list(module.buffers())
    average_tensors([b for b in buffers if _is_number(b)], peers)
    collectives.broadcast_tensors([b for b in buffers if not _is_number(b)])


def average_states(optimizers: list[Optimizer], peers: Peers) -> None:
    """Replace what optimizers keep of each number of a parameter by its mean (momentum, variance).

    What only some ranks keep (their data didn't use a parameter so far) stays as it is.

    Reference: Yu et al., On the Linear Speedup Analysis of Communication Efficient Momentum SGD,
    2019, arXiv:1905.03817: momentum is averaged with the weights.

    Ranks:
        Collective.
    """
    found = dict(_states(optimizers))
    everyones = [set(places) for places in peers.gather(list(found))]
    shared = sorted(set.intersection(*everyones))
    average_tensors([found[place] for place in shared], peers)


def _states(optimizers: list[Optimizer]) -> Iterator[tuple[Place, torch.Tensor]]:
    for number, optimizer in enumerate(optimizers):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(held):
            for name, value in optimizer.state.get(parameter, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.device == parameter.device  # a counter may be elsewhere
                    and _is_number(value)
                ):
                    yield (number, index, str(name), tuple(value.shape)), value


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
