"""A net's outputs on their way to the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fitkit import trees
from fitkit.data.to_device import CudaStreams, tensors_in


class HostCopies:
    """Collects batches' outputs on the CPU, without waiting for the device at each of them.

    From a GPU they are copied on a stream of their own into pinned memory while the next batch is
    computed; one batch later they are taken from there, and the device's memory is free again.

    Args:
        streams: makes the GPU's streams, given its device.

    Attributes:
        outputs: the batches' outputs in their order; the last one is there after `settle`.
    """

    def __init__(self, streams: Callable[[torch.device], Any] = CudaStreams) -> None:
        self.outputs: list[Any] = []
        self._make_streams = streams
        self._streams: Any = None
        self._flying: tuple[Any, Any] | None = None

    def add(self, output: Any) -> None:
        """Take a batch's output."""
        if isinstance(output, torch.Tensor) and output.is_cpu and self._flying is None:
            self.outputs.append(output)
            return
        device = _gpu_of(output)
        if device is None:
            self.settle()
            self.outputs.append(on_host(output))
            return
        if self._streams is None:
            self._streams = self._make_streams(device)
        streams = self._streams
        with streams.aside(after=True):
            copies = _mapped(output, streams.start_copy)
            copied = streams.mark()
            for tensor in tensors_in(output):
                streams.used_here(tensor)
        self.settle()
        self._flying = copies, copied

    def settle(self) -> None:
        """Wait for the copies that are on their way."""
        if self._flying is None:
            return
        (copies, copied), self._flying = self._flying, None
        self._streams.wait_on_host(copied)
        # Pinned memory is scarce, and used again for the next batches: it isn't for keeping.
        self.outputs.append(_mapped(copies, torch.Tensor.clone))


def on_host(output: Any) -> Any:
    """A net's output on the CPU; a dict (or Hugging Face's objects) without its Nones."""
    return output.cpu() if isinstance(output, torch.Tensor) else _mapped(output, torch.Tensor.cpu)


def _mapped(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A net's output with a function applied to its tensors; a dict without its Nones."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if hasattr(output, "items"):
        return {key: _mapped(value, function) for key, value in output.items() if value is not None}
    return trees.map_leaves(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, output
    )


def _gpu_of(output: Any) -> torch.device | None:
    """The CUDA device that all of an output's tensors are on; None where that isn't so."""
    tensors = list(tensors_in(output))
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return None  # streams can't be told of their memory
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None
