"""A GPU's streams: copies that run beside what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fitkit import trees


class CudaStreams:
    """One stream for copies, beside the one on which the device computes.

    Whoever copies asks this object for all that concerns streams, so that a double of it can test
    the order of things without a GPU.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def aside(self, *, after: bool = False) -> AbstractContextManager[Any]:
        """What is started within runs on the stream for copies.

        Args:
            after: whether it waits for what is computed so far.
        """
        if after:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event:
        """What comes when all that was started so far on the present stream is done."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Let the present stream wait for a mark; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def wait_on_host(self, mark: torch.cuda.Event) -> None:
        """Wait for a mark."""
        mark.synchronize()

    def used_here(self, tensor: Any) -> None:
        """Keep a tensor's memory from being given away before the present stream is done with it.

        Args:
            tensor: made on the other stream; anything with torch's `record_stream`.
        """
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def start_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's copy in pinned memory; its numbers are there when the stream is done."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of main memory where the device can fetch it by itself."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def free_bytes(self) -> int:
        """The device's free memory."""
        return torch.cuda.mem_get_info(self._device)[0]


def tensors_in(tree: Any) -> Iterator[Any]:
    """The leaves whose memory streams must know of: tensors, and objects that hold some."""
    return (leaf for leaf in trees.leaves(tree) if hasattr(leaf, "record_stream"))
