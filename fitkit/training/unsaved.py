"""Tensors that the model's state dict leaves out, as far as a training changes them.

These are buffers that aren't persistent, and what modules beside the model hold (`trained.py`). A
checkpoint holds those that aren't as they were before the training, such as a memory of what the
net has seen. What never changes, such as masks and teachers, stays out of it. The same holds for
the numbers in an optimizer's attributes, such as a counter of its own.
"""

from __future__ import annotations

import torch
import xxhash

from fitkit.arguments import dtype_name
from fitkit.buffers import Place
from fitkit.checkpoint.arrays import STORED_AS
from fitkit.checkpoint.uncompiled import plain_name
from fitkit.errors import CheckpointError
from fitkit.module import Module
from fitkit.optimizer_copies import numbers_of, put_numbers, with_inner
from fitkit.tensors import bytes_of
from fitkit.typing import PlainData


def note(model: Module) -> None:
    """Note what these tensors are before the first training; later calls do nothing."""
    state = model._fitkit.fit_state
    if state.unsaved is None:
        state.unsaved = {name: _digest(tensor) for name, tensor in _buffers(model).items()}
        for number, optimizer in enumerate(with_inner(state.optimizers)):
            for name, value in numbers_of(optimizer).items():
                state.unsaved[f"optimizer {number}.{name}"] = _digest(torch.as_tensor(value))


def changed(model: Module) -> dict[str, torch.Tensor]:
    """Return the tensors that aren't as they were noted, by name. They are in use."""
    noted = model._fitkit.fit_state.unsaved
    if noted is None:
        return {}
    return {n: tensor for n, tensor in _buffers(model).items() if noted.get(n) != _digest(tensor)}


def changed_numbers(model: Module) -> list[PlainData]:
    """Return the numbers in the attributes of optimizers, and of those inside, that changed."""
    noted = model._fitkit.fit_state.unsaved or {}
    return [
        {
            name: value
            for name, value in numbers_of(optimizer).items()
            if noted.get(f"optimizer {number}.{name}") != _digest(torch.as_tensor(value))
        }
        for number, optimizer in enumerate(with_inner(model._fitkit.fit_state.optimizers))
    ]


def check(training: PlainData, path: str) -> None:
    """Refuse what `changed` never gives; CheckpointError."""
    found = training.get("buffers", {})
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise CheckpointError(f"{path} is refused: its buffers aren't tensors by name.")
    numbers = training.get("optimizer_numbers", [])
    if not isinstance(numbers, list) or not all(isinstance(one, dict) for one in numbers):
        raise CheckpointError(f"{path} is refused: its optimizers' numbers aren't dicts.")


def restore(model: Module, training: PlainData) -> None:
    """Give the model and its optimizers what `changed` and `changed_numbers` have returned."""
    places = _places(model)
    for name, value in training.get("buffers", {}).items():
        if name in places:
            places[name].put(value)
    optimizers = with_inner(model._fitkit.fit_state.optimizers)
    for optimizer, numbers in zip(optimizers, training.get("optimizer_numbers", []), strict=False):
        put_numbers(optimizer, numbers)


def _places(model: Module) -> dict[str, Place]:
    """Those that `Trained.saved` doesn't have."""
    trained = model._fitkit.compilation.trained(model)
    saved = {(id(p.holder), p.key) for places in trained.saved() for p in places.values()}
    found = trained.places_unlisted()
    unsaved = ((n, p) for n, p in found.items() if (id(p.holder), p.key) not in saved)
    return {plain_name(name): place for name, place in unsaved}


def _buffers(model: Module) -> dict[str, torch.Tensor]:
    """Those that a file can hold."""
    found = {name: place.tensor for name, place in _places(model).items()}
    held = {name: tensor.detach() for name, tensor in found.items() if tensor is not None}
    return {name: tensor for name, tensor in held.items() if _fits(tensor)}


def _fits(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return plain and not tensor.is_meta and dtype_name(tensor.dtype) in STORED_AS


def _digest(tensor: torch.Tensor) -> str:
    # Not a tensor's version: torch's own kernels and compiled steps don't always count.
    raw = bytes_of(tensor.detach().cpu()).numpy().data
    kind = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    return f"{kind} {xxhash.xxh3_128_hexdigest(raw)}"
