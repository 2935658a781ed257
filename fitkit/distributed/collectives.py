"""What ranks say to each other: the one seam to torch.distributed.

Every function of a `Collectives` must be called by all ranks, in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Collectives(Protocol):
    """Rank, world size, and the exchanges that fitkit needs beside a strategy's own."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that can be pickled), in rank order, on every rank."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def scatter(self, values: list[Any] | None) -> Any:
        """This rank's entry of the list that rank 0 gives; the others give None."""

    def sums(self, numbers: list[float]) -> list[float]:
        """The numbers summed over the ranks, in float64."""

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replace gradients by their mean over the ranks."""

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's rows (N_r, ...) one below the other: (sum of N_r, ...), with gradients."""


class Solo:
    """The collectives of a run with one rank: nothing is exchanged."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def scatter(self, values: list[Any] | None) -> Any:
        assert values is not None
        return values[0]

    def sums(self, numbers: list[float]) -> list[float]:
        return numbers

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        pass

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        pass

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ProcessGroup:
    """The collectives of torch's default process group.

    Args:
        device: this rank's device; NCCL exchanges only what is there.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: Any) -> Any:
        holder = [value]
        dist.broadcast_object_list(holder, src=0, device=self._device)
        return holder[0]

    def scatter(self, values: list[Any] | None) -> Any:
        holder: list[Any] = [None]
        dist.scatter_object_list(holder, values, src=0)
        return holder[0]

    def sums(self, numbers: list[float]) -> list[float]:
        packed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(packed)
        return list(packed.tolist())

    @torch.no_grad()
    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            # In place also where a tensor's memory isn't contiguous.
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        held = [parameter for parameter in parameters if parameter.requires_grad]
        if not held:
            return
        for parameter in held:
            if parameter.grad is None:  # unused on this rank; perhaps used on another
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in held:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            packed = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(packed)
            packed /= self.world_size
            parts = packed.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = _JoinRows.apply(tensor, self.gather(len(tensor)), self.rank)
        return joined


class _JoinRows(torch.autograd.Function):
    """Rows of all ranks; their gradients are summed over the ranks on the way back.

    torch's own functions for this are deprecated in 2.13, in favour of private ones.
    """

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
        context.rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        most = max(sizes)
        padded = tensor.new_zeros(most, *tensor.shape[1:])  # the exchange needs equal shapes
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole)
        return whole[context.rows], None, None
