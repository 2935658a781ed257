"""Floating numbers as bytes: blocks of 8-bit numbers between each block's least and greatest.

Reference: Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, 2021,
arXiv:2107.01499 (section 3.2: the compression function Q, here min–max).
"""

from __future__ import annotations

import torch

BLOCK = 2048
"""Numbers that share one range; the range takes 8 bytes, 0.4 % of what travels."""
LEVELS = 255
RANGE_BYTES = 8


def wire_bytes(numbers: int) -> float:
    """How many bytes so many numbers are on the wire, the filling up aside."""
    return numbers * (1 + RANGE_BYTES / BLOCK)


def block_of(length: int) -> int:
    """The size of the blocks in which a row of some length is cut with the least filling up."""
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
    """The rows that `encode` was given, but for the rounding.

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
