"""The places of a module's parameters, for those who put others there and leave no trace."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn


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
