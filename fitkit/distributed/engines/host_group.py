"""The collectives of ranks whose devices a process group on the CPU can't reach."""

from __future__ import annotations

from typing import Protocol

import torch

from fitkit.distributed.collectives import ProcessGroup


class Sums(Protocol):
    """Sums tensors over the ranks, on their devices."""

    def sum(self, tensors: list[torch.Tensor]) -> None: ...


class HostGroup(ProcessGroup):
    """Exchanges by way of the CPU, but for gradients, which stay on the devices.

    Args:
        device: this rank's.
        sums: exchanges what is there.
    """

    def __init__(self, device: torch.device, sums: Sums) -> None:
        super().__init__(torch.device("cpu"))
        self._place = device
        self._sums = sums

    @torch.no_grad()
    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        copies = [tensor.detach().cpu() for tensor in tensors]
        super().broadcast_tensors(copies)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    @torch.no_grad()
    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        held = [parameter for parameter in parameters if parameter.requires_grad]
        # Told on the CPU: looking at numbers on the device would interrupt it at each step.
        everyone = self.gather([parameter.grad is not None for parameter in held])
        used = [p for p, *users in zip(held, *everyone, strict=True) if any(users)]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in used if parameter.grad is not None]
        if gradients:
            self._sums.sum(gradients)
            torch._foreach_div_(gradients, self.world_size)

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().join_rows(tensor.cpu()).to(self._place)
