"""What a module replaces or resizes while it trains beside its weights, and how it comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy


class Place(NamedTuple):
    """Where a module holds a parameter or a buffer.

    The tensor itself may be replaced: `self.mean = 0.9 * self.mean + 0.1 * x` makes a new one.
    """

    holder: dict[str, torch.Tensor | None]
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        # A traced module's holder has no `get`.
        return self.holder[self.key] if self.key in self.holder else None  # noqa: SIM401

    @torch.no_grad()
    def put(self, value: torch.Tensor) -> None:
        """Put a value there: into the tensor, or in its place if it has another shape, or was made
        under `torch.inference_mode()`, where torch lets nobody write.
        """
        current = self.tensor
        if current is None or current.shape != value.shape or current.is_inference():
            device = value.device if current is None else current.device
            self.holder[self.key] = value.to(device, copy=True)
        else:
            current.copy_(value)


def restorer(places: Iterable[Place], device: str | None = None) -> Callable[[], None]:
    """Return a function that puts the values back that these places have now.

    Args:
        device: where the copies wait; None for where the values are.
    """
    copies = [
        (place, tensor.detach().to(device or tensor.device, copy=True))
        for place in places
        if (tensor := place.tensor) is not None and not (tensor.is_meta or is_lazy(tensor))
    ]

    def restore() -> None:
        for place, value in copies:
            place.put(value)

    return restore


def attributes_restorer(objects: Iterable[Any]) -> Callable[[], None]:
    """Return a function that gives objects back the attributes that they have now.

    That is also what is in their lists, dicts and sets, such as a module's parts. Numbers in
    tensors stay as they are then.
    """
    kept = [(vars(one), dict(vars(one))) for one in objects]
    containers = [
        (value, copy.copy(value))
        for _, held in kept
        for value in held.values()
        if isinstance(value, (list, dict, set))
    ]

    def restore() -> None:
        for own, held in [*kept, *containers]:
            own.clear()
            (own.extend if isinstance(own, list) else own.update)(held)

    return restore


def part_at(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path, past attributes: `model.net` may be another library's
    network.
    """
    for name in path.split(".") if path else ():
        part = module._modules[name]
        assert part is not None
        module = part
    return module


def places_of(module: nn.Module, *, buffers: bool = True) -> dict[str, Place]:
    """Return the places of a module's parameters and buffers, by name. Shared ones come once."""
    names = [name for name, _ in module.named_parameters()]
    names += [name for name, _ in module.named_buffers()] if buffers else []
    found = {}
    for name in names:
        prefix, _, key = name.rpartition(".")
        part = part_at(module, prefix)
        held: Any = part._parameters if key in part._parameters else part._buffers
        found[name] = Place(held, key)
    return found


def extra_states(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return copies of what submodules keep beside their tensors, for their `set_extra_state`."""
    return [
        (part, copy.deepcopy(part.get_extra_state()))
        for part in module.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]


def resize_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give buffers the shapes that they have in a state dict, so that `load_state_dict` takes it.

    A buffer may grow while the module trains, such as a memory of what it has seen.
    """
    for name, buffer in list(module.named_buffers()):
        value = state.get(name)
        if isinstance(value, torch.Tensor) and value.shape != buffer.shape:
            prefix, _, key = name.rpartition(".")
            part_at(module, prefix)._buffers[key] = buffer.new_empty(value.shape)
