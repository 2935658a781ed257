"""Bagua's `bytegrad`: the mean of gradients, with 8-bit numbers on the wire."""

import dataclasses

import torch

from fitkit.extras.bagua.base import Algorithm, Peers, all_reduce_bytes

BLOCK = 2048
"""Numbers that share one range; the range takes 8 bytes, 0.4 % of what travels."""
LEVELS = 255
RANGE_BYTES = 8


def wire_bytes(numbers: int) -> float:
    """How many bytes so many numbers are on the wire, the filling up aside."""
    return numbers * (1 + RANGE_BYTES / BLOCK)


def block_of(length: int) -> int:
    """Return the size of the blocks in which a row of some length is cut with the least filling
    up.
    """
    blocks = max(-(-length // BLOCK), 1)
    return max(-(-length // blocks), 1)


def encode(rows: torch.Tensor) -> torch.Tensor:
    """Rows of numbers as rows of bytes.

    Each number is off by at most 1/510 of its block's range. A block with a number that isn't
    finite comes out as NaN whole, so that nothing hides it.

    Args:
        rows: floating.

    Shapes: (R, K) to (R, B * (8 + block)), B blocks of at most 2,048 numbers.
    """
    count, length = rows.shape
    block = block_of(length)
    blocks = -(-length // block)
    filling = blocks * block - length
    if filling:  # with a number of the last block, whose range stays as it is
        rows = torch.cat([rows, rows[:, -1:].expand(count, filling)], 1)
    cut = rows.reshape(count, blocks, block)
    ranges = torch.stack([cut.amin(2), cut.amax(2)], 2).float()  # (R, B, 2)
    low, step = _scale(ranges, cut.dtype)
    levels = cut.sub(low).div_(step).nan_to_num_(0.0).round_().clamp_(0, LEVELS)
    written = ranges.reshape(count, -1).view(torch.uint8)  # (R, B * 8)
    return torch.cat([written, levels.to(torch.uint8).reshape(count, -1)], 1)


def decode(wire: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows that `encode` was given, but for the rounding.

    Args:
        wire: bytes.
        length: how long the rows were.
        dtype: which they had.

    Shapes: (R, B * (8 + block)) to (R, length).
    """
    count = len(wire)
    block = block_of(length)
    blocks = -(-length // block)
    # A copy: a slice may begin where no float may, and one row counts as contiguous anyway.
    written = wire[:, : blocks * RANGE_BYTES].clone(memory_format=torch.contiguous_format)
    ranges = written.view(torch.float32).view(count, blocks, 2)
    low, step = _scale(ranges, dtype)
    levels = wire[:, blocks * RANGE_BYTES :].reshape(count, blocks, block).to(dtype)
    return levels.mul_(step).add_(low).view(count, -1)[:, :length]


def _scale(ranges: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's least number and distance between levels: (R, B, 1) each.

    The ranks must find the same, and so both sides begin from what travels.
    """
    low, high = ranges.to(dtype).split(1, 2)
    return low, (high - low) / LEVELS


@dataclasses.dataclass
class Feedback:
    """What compression has taken from this rank's vectors so far; it is added to the next one.

    Attributes:
        local: of what this rank sent: (N,).
        chunk: of the part of the mean that this rank computes: (ceil(N / ranks),).
    """

    local: torch.Tensor
    chunk: torch.Tensor

    @classmethod
    def none(cls, vector: torch.Tensor, ranks: int) -> "Feedback":
        """Nothing so far, for vectors like this one."""
        return cls(torch.zeros_like(vector), vector.new_zeros(chunk_length(len(vector), ranks)))


def chunk_length(length: int, ranks: int) -> int:
    """How much of a vector each rank averages."""
    return -(-length // ranks)


@torch.no_grad()
def compressed_mean(
    vector: torch.Tensor, peers: Peers, feedback: Feedback | None = None
) -> torch.Tensor:
    """Return the mean over the ranks, each number off by at most 1/510 of its block's range a leg.

    Every rank gets the same numbers, to the last bit.

    Args:
        vector: floating: (N,). It stays as it is.
        feedback: errors to put right now and to keep for the next time; None for none.

    Ranks:
        Collective. A rank sends 2 (R - 1) / R bytes a number, a quarter of what an all-reduce
        of float32 sends.
    """
    length, size = len(vector), peers.size
    chunk = chunk_length(length, size)
    sent = vector if feedback is None else vector + feedback.local
    filling = chunk * size - length
    # Filled up with its last number, which leaves the ranges of the blocks as they are.
    filled = torch.cat([sent, sent[-1:].expand(filling)]) if filling else sent
    wire = encode(filled.view(size, chunk))
    if feedback is not None:
        feedback.local = sent - decode(wire, chunk, vector.dtype).reshape(-1)[:length]
    part = decode(peers.deal(wire), chunk, vector.dtype).mean(0)
    if feedback is not None:
        part = part + feedback.chunk
    wire = encode(part[None])
    if feedback is not None:
        feedback.chunk = part - decode(wire, chunk, vector.dtype)[0]
    return decode(peers.join(wire[0]), chunk, vector.dtype).reshape(-1)[:length]


def merge_feedback(feedback: Feedback, peers: Peers) -> None:
    """Bring all ranks' errors into what each of them keeps of its own, in equal parts.

    What the next mean puts right stays the same, but any rank's copy can be kept for all.

    Ranks:
        Collective.
    """
    begin = peers.rank * len(feedback.chunk)
    local = feedback.local[begin : begin + len(feedback.chunk)]
    local += feedback.chunk[: len(local)] * peers.size  # of which the mean is taken now
    feedback.chunk = torch.zeros_like(feedback.chunk)
    peers.mean(feedback.local)


class ByteGrad(Algorithm):
    """Gradients travel as bytes between each block's least and greatest number, both ways.

    Each rank gets a part of every bucket from all ranks, averages it and hands the mean out: a
    quarter of the traffic of an all-reduce of float32. All ranks hold the same weights.

    Reference: Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, 2021,
    arXiv:2107.01499 (C_LP_S, without error compensation).
    """

    name = "bytegrad"
    compresses = True

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return all_reduce_bytes(wire_bytes(numbers), ranks)

    def mean(self, gradients: torch.Tensor) -> torch.Tensor:
        return compressed_mean(gradients, self._peers)
