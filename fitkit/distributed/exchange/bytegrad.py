"""Bagua's `bytegrad`: the mean of gradients, with 8-bit numbers on the wire.

This file has no postponed annotations: torch compares a hook's with its own classes.
"""

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from fitkit.distributed.costs import all_reduce
from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.byte_codec import wire_bytes
from fitkit.distributed.exchange.compressed_mean import compressed_mean
from fitkit.distributed.exchange.flat_tensors import FlatTensors
from fitkit.distributed.exchange.hooks import Hook, finished
from fitkit.distributed.exchange.peers import Peers


class ByteGrad(Exchange):
    """Gradients travel as bytes between each block's least and greatest number, both ways.

    Each rank gets a part of every bucket from all ranks, averages it and hands the mean out: a
    quarter of the traffic of an all-reduce of float32. All ranks hold the same weights.

    Reference: Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, 2021,
    arXiv:2107.01499 (C_LP_S, without error compensation).
    """

    name = "bytegrad"

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return all_reduce(wire_bytes(numbers), ranks)

    def hook(self) -> Hook:
        return bytes_hook(self._peers)

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> bool:
        held = [parameter for parameter in parameters if parameter.requires_grad]
        if not held:
            return True
        users = torch.tensor([float(p.grad is not None) for p in held], device=held[0].device)
        self._peers.mean(users)
        used = [p for p, share in zip(held, users.tolist(), strict=True) if share]
        for parameter in used:  # one that other ranks used counts as zero here
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = FlatTensors(p.grad for p in used if p.grad is not None)
        if used:
            gradients.write(compressed_mean(gradients.read(), self._peers))
        return True


def bytes_hook(peers: Peers) -> Hook:
    """A hook of DDP's that averages a bucket by `compressed_mean`."""

    def bytes_mean(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = FlatTensors([bucket.buffer()])
        gradients.write(compressed_mean(gradients.read(), peers))
        return finished(bucket.buffer())

    return bytes_mean
