"""What trains together: a model, and the modules beside it that its losses, metrics and steps hold.

These are losses that are modules, wherever they are: in lists and dicts, in the attributes of other
losses, in a `functools.partial`, behind a bound method. A model's own steps may keep modules in
plain lists and dicts, and metrics may be modules that remember epochs. All of them are placed,
converted, shared between ranks, saved, restored, averaged and copied with the model.

As in torch, what a module keeps in a plain list isn't among its parameters: it learns only if an
optimizer is given it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from fitkit.accelerators import move
from fitkit.buffers import Place
from fitkit.distributed.strategies import Strategy
from fitkit.held_modules import CONTAINERS, entries_of
from fitkit.modes import modules_of, parameters_of, tensors_of


def _hidden_in(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in plain containers of a module's own attributes."""
    for key, value in vars(module).items():
        if type(value) in CONTAINERS and value and not key.startswith(_TORCHS):
            yield from _contained(value, f"{name}.{key}", seen)


def _contained(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are entries of a container, or of those in it."""
    if id(value) in seen:
        return
    if isinstance(value, nn.Module):
        seen.update(map(id, modules_of(value)))
        yield name, value
    elif isinstance(value, CONTAINERS):
        seen.add(id(value))
        for step, part in entries_of(value):
            yield from _contained(part, name + step, seen)


_TORCHS = (
    "_parameters", "_buffers", "_modules", "_non_persistent", "_backward", "_forward",
    "_state_dict", "_load_state_dict", "_is_full_backward",
)  # fmt: skip
"""How the names of containers begin that torch itself keeps in each module."""


def is_torchs_loss(module: nn.Module) -> bool:
    """Whether a module is a loss of torch's, which has constants at most."""
    return isinstance(module, _Loss) and type(module).__module__.startswith("torch.nn.")


class Trained:
    """A model and what trains with it, as one value.

    Args:
        model: the model.
        losses: the modules of the losses that `compile` was given, by name; they may learn.
        others: those of its metrics, and torch's losses, which have constants at most.

    Attributes:
        model: as given.
    """

    def __init__(
        self, model: nn.Module, losses: dict[str, nn.Module], others: dict[str, nn.Module]
    ) -> None:
        self.model = model
        self._losses, self._others = losses, others

    @functools.cached_property
    def losses(self) -> dict[str, nn.Module]:
        """The losses that aren't parts of the model."""
        if not self._losses:
            return {}
        own = set(modules_of(self.model))
        return {name: module for name, module in self._losses.items() if module not in own}

    @functools.cached_property
    def others(self) -> dict[str, nn.Module]:
        """The other modules, and what the model and its losses keep in plain containers."""
        known = modules_of(self.model, *self.losses.values())
        seen = set(map(id, known))
        found = {n: module for n, module in self._others.items() if id(module) not in seen}
        seen.update(map(id, modules_of(*found.values())))
        found.update(_hidden_in(self.model, "model", seen))
        for name, loss in self.losses.items():
            for part in modules_of(loss):
                found.update(_hidden_in(part, name, seen))
        return found

    @property
    def beside(self) -> dict[str, nn.Module]:
        """All modules beside the model, by name."""
        return {**self.losses, **self.others}

    def modules(self) -> list[nn.Module]:
        """Return all modules with their submodules, each once."""
        return modules_of(self.model, *self.beside.values())

    def learning(self) -> list[nn.Parameter]:
        """Return the parameters of an optimizer that is given by name."""
        return parameters_of(self.model, *self.losses.values())

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer may hold."""
        return parameters_of(self.model, *self.beside.values())

    def buffers(self) -> list[torch.Tensor]:
        """Return all buffers, each once."""
        found = {id(b): b for module in self.modules() for b in module.buffers(recurse=False)}
        return list(found.values())

    def places(self) -> list[Place]:
        """Return where all parameters and buffers are."""
        return list(_places(self.modules()))

    def places_beside(self) -> dict[str, Place]:
        """Return where the tensors are that aren't the model's, by name."""
        own = {id(place.holder) for place in _places(modules_of(self.model))}
        return {
            f"{name}.{path}": place
            for name, module in self.beside.items()
            for path, place in places_in(module).items()
            if id(place.holder) not in own  # a loss may hold the net
        }

    def places_unlisted(self) -> dict[str, Place]:
        """Return where the tensors are that the model's state dict lacks, by name.

        These are also its buffers that aren't persistent.
        """
        own = {
            f"{prefix}.{key}": Place(part._buffers, key)
            for prefix, part in self.model.named_modules()
            for key in sorted(part._non_persistent_buffers_set)
        }
        return {**own, **self.places_beside()}

    def saved(self) -> list[dict[str, Place]]:
        """Return where each loss that has tensors has those that files always keep."""
        found = [places_in(module, saved=True) for module in self.losses.values()]
        return [places for places in found if places]

    def place(self, strategy: Strategy, *, for_training: bool = False) -> None:
        """Move all to this rank's device, in the strategy's precision, with rank 0's values.

        Args:
            for_training: as in `Strategy.place`.
        """
        strategy.place(self.model, for_training=for_training)
        if not self.beside:
            return
        for module in self.losses.values():
            strategy.precision.convert_loss(module)
        for name, module in self.others.items():
            is_models = name.startswith("model.")
            convert = strategy.precision.convert if is_models else strategy.precision.convert_loss
            convert(module)
        tensors = [t for module in self.beside.values() for t in tensors_of(module)]
        for module in self.beside.values():
            if any(tensor.device != strategy.device for tensor in tensors_of(module)):
                move(module, strategy.device)
        strategy.collectives.broadcast_tensors(tensors)

    def buffers_beside(self) -> list[Place]:
        """Return where the modules beside the model have buffers. These may be replaced."""
        modules = modules_of(*self.beside.values())
        # By `items`, because a traced module's holder can't be iterated over.
        return [Place(part._buffers, key) for part in modules for key, _ in part._buffers.items()]

    def share_buffers(self, strategy: Strategy) -> None:
        """Give all ranks rank 0's buffers.

        Ranks:
            Collective.
        """
        strategy.collectives.broadcast_tensors(self.buffers())


def share(places: Iterable[Place], strategy: Strategy) -> None:
    """Give all ranks rank 0's values at some places.

    Ranks:
        Collective.
    """
    held = [tensor for place in places if (tensor := place.tensor) is not None]
    strategy.collectives.broadcast_tensors(held)


def places_in(module: nn.Module, *, saved: bool = False) -> dict[str, Place]:
    """Return where a module has parameters and buffers, by name; also buffers that are None yet.

    Args:
        saved: whether to leave out buffers that state dicts leave out.
    """
    found = {}
    for prefix, part in module.named_modules():
        left_out = part._non_persistent_buffers_set if saved else ()
        for place in _places([part]):
            if place.key not in left_out:
                found[f"{prefix}.{place.key}" if prefix else place.key] = place
    return found


def _places(modules: Iterable[nn.Module]) -> Iterator[Place]:
    for part in modules:
        holders: tuple[Any, Any] = (part._parameters, part._buffers)
        for holder in holders:
            for key, _ in holder.items():  # as above
                yield Place(holder, key)
