"""Tensors that are spread over the ranks, as whole ones and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn


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


@dataclasses.dataclass
class Place:
    """Where a parameter is.

    Attributes:
        module: the submodule that has it.
        name: its name there.
        parameter: the ordinary parameter.
        shape: its own.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shape: torch.Size

    def put(self, parameter: nn.Parameter) -> None:
        """Let the module have this parameter there."""
        # Recurrent layers note their weights when one is set.
        setattr(self.module, self.name, parameter)


def places_of(module: nn.Module) -> list[Place]:
    """All places of parameters; a shared one has several."""
    return [
        Place(part, name, parameter, parameter.shape)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def take_off_hooks(part: nn.Module, origins: str | tuple[str, ...]) -> None:
    """Take hooks off a submodule, which torch has no way to do without their handles.

    Args:
        origins: how the names begin of the modules that they come from.
    """
    numbers = [
        number
        for name, held in vars(part).items()
        if name.endswith("_hooks")
        for number, hook in held.items()
        if str(getattr(hook, "__module__", "")).startswith(origins)
    ]
    for held in vars(part).values():
        if isinstance(held, dict):
            for number in numbers:
                held.pop(number, None)
