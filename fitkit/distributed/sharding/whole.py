"""Tensors that are spread over the ranks, as whole ones and back."""

from __future__ import annotations

from typing import Any

import torch


def is_spread(value: Any) -> bool:
    """Whether a value is a tensor that is spread over ranks."""
    # Its class is loaded by whoever spreads a tensor, and by nobody else.
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """A spread tensor's numbers from all ranks; any other value as it is.

    Ranks:
        Collective.
    """
    return _gathered(value) if is_spread(value) else value


def _gathered(value: Any) -> torch.Tensor:
    if value.device_mesh.ndim > 1:
        from torch.distributed.tensor import Replicate

        # One dimension after the other: a tensor may be divided along both in the same direction.
        value = value.redistribute(placements=[Replicate(), *value.placements[1:]])
    found: torch.Tensor = value.full_tensor()
    return found


def whole_on_host(value: Any) -> Any:
    """As `whole`, in main memory.

    Ranks:
        Collective.
    """
    return _gathered(value).cpu() if is_spread(value) else value


def whole_for_file(value: Any, wanted: bool) -> Any:
    """As `whole`, in main memory; a rank that doesn't want it gets its part as a plain tensor.

    Ranks:
        Collective.
    """
    if not is_spread(value):
        return value
    numbers = whole(value.detach())
    return numbers.cpu() if wanted else value.to_local()


def as_parts(value: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor, the same on all ranks, spread as another is; this rank keeps its part.

    One that is spread already, or beside one that isn't, is itself.
    """
    if is_spread(value) or not is_spread(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    placed = value.detach().to(like.device)
    # No exchange, and a copy: the part of a view would keep the whole alive.
    spread: torch.Tensor = distribute_tensor(
        placed, like.device_mesh, like.placements, src_data_rank=None
    )
    return spread.clone()
