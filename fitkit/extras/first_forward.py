"""What a net sets in its first forward: made equal on all ranks.

Some layers set parameters or buffers from their first batch (activation norms, codebooks), or draw
them then. Each rank has another batch and other random numbers, and only rank 0's model is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError
from fitkit.seams.strategies import Collectives

AS_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**22
"""The most entries to convert at once."""


@torch.no_grad()
def share_first_state(
    collectives: Collectives, module: nn.Module, optimizers: Iterable[Optimizer]
) -> None:
    """Give all ranks rank 0's values of the tensors that differ between them, after a first batch.

    These are parameters, with their states in the optimizers, and buffers. Running statistics of
    batch normalisations may differ: each rank has its own batch. What ranks hold in parts isn't
    compared.

    Ranks:
        Collective: one exchange of a number for each tensor, and the tensors that differ.
    """
    tensors = [tensor for tensor in _compared(module) if _is_whole(tensor)]
    mine = [int(digest) for digest in map(_digest, tensors)]
    by_rank = collectives.gather(mine)
    if not all(len(digests) == len(mine) for digests in by_rank):
        return  # a rank has made other tensors, and can't take these
    differing = [
        tensor for tensor, *found in zip(tensors, *by_rank, strict=True) if len(set(found)) > 1
    ]
    if not differing:
        return
    states = [
        value
        for optimizer in optimizers
        for tensor in differing
        for value in optimizer.state.get(tensor, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    collectives.broadcast_tensors([*differing, *states])


@contextlib.contextmanager
def refusing_writes(module: nn.Module) -> Iterator[None]:
    """Refuse a first forward that sets parameters, where a layer has them only for its forward.

    A net that is compiled isn't watched: torch would compile it once more without the hooks.

    Raises:
        ConfigurationError: with the parameters' names.
    """
    if any(part._compiled_call_impl is not None for part in module.modules()):
        yield
        return
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    handles: list[Any] = []

    def noting(place: str, digests: dict[str, torch.Tensor]) -> Callable[..., None]:
        def note(part: nn.Module, *arguments: Any) -> None:
            for name, parameter in part.named_parameters(place, recurse=False):
                if _is_whole(parameter) and not (digests is before and name in before):
                    digests[name] = _digest(parameter)

        return note

    for place, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(noting(place, before)))
        handles.append(part.register_forward_hook(noting(place, after), prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    written = [name for name, digest in after.items() if digest != before.get(name, digest)]
    if written:
        raise ConfigurationError(
            f"The first forward sets {', '.join(written[:3])}, but strategy='fsdp' has a layer's "
            "whole parameters only while it computes, so the values would be lost. Let the net "
            "compute a batch in training mode before fit, or write strategy='ddp'."
        )


def _compared(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    seen: set[int] = set()
    for part in module.modules():
        if not isinstance(part, _NormBase):
            for buffer in part.buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one piece of memory, with all of its values on this rank."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole number () of a tensor's bits, in their places, and of its shape."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.contiguous().view(AS_WHOLE_NUMBERS[flat.element_size()])
    places = torch.arange(1, 2 * min(len(bits), CHUNK) + 1, 2, device=bits.device)
    total = torch.full((), hash(tuple(tensor.shape)) >> 8, device=bits.device)
    for part in bits.split(CHUNK):
        total = 31 * total + (part.long() * places[: len(part)]).sum()
    return total
