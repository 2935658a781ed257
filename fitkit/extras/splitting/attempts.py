"""What a step changes before its update, and how all of it comes back after a failed attempt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fitkit.accelerators import generator_states, set_generator_states
from fitkit.random_states import random_state, set_random_state

Restore = Callable[[], None]


class KeptBuffers:
    """Copies of buffers, which are made anew only of those that have changed.

    Args:
        modules: have the buffers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [
            (part._buffers, key) for part in modules for key, _ in part._buffers.items()
        ]
        self._seen: list[tuple[torch.Tensor | None, int]] = [(None, -1)] * len(self._places)
        self._copies: list[torch.Tensor | None] = [None] * len(self._places)

    def note(self) -> None:
        """Keep what the buffers hold now."""
        seen, copies = self._seen, self._copies
        for number, (holder, key) in enumerate(self._places):
            tensor = holder[key]
            version = -1 if tensor is None else tensor._version
            if seen[number][0] is not tensor or seen[number][1] != version:
                seen[number] = tensor, version
                copies[number] = None if tensor is None else tensor.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what they held."""
        for number, (holder, key) in enumerate(self._places):
            (tensor, version), kept = self._seen[number], self._copies[number]
            if holder[key] is tensor and (tensor is None or tensor._version == version):
                continue
            holder[key] = tensor
            if tensor is not None and kept is not None:
                if tensor.shape != kept.shape:
                    tensor.resize_(kept.shape)
                tensor.copy_(kept)
                self._seen[number] = tensor, tensor._version


def random_numbers(device: torch.device, *, all_libraries: bool) -> Restore:
    """Return what puts random numbers back: torch's, on the CPU and on the device.

    Args:
        all_libraries: whether also Python's and NumPy's, which code of the user's may draw. They
            cost some 40 µs.
    """
    if all_libraries:
        state = random_state(devices=[device])
        return lambda: set_random_state(state, devices=[device])
    on_cpu, on_device = torch.get_rng_state(), generator_states([device])

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        set_generator_states([device], on_device)

    return restore


class MovedGradients:
    """The gradients of a group's earlier batches, aside while a batch is computed.

    A failed backward leaves parts of its own. So the two are added up once it has succeeded, which
    gives the same bits as torch's own adding.

    Args:
        parameters: have the gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._earlier = [parameter.grad for parameter in parameters]
        self.drop()

    def drop(self) -> None:
        """Drop the gradients of an attempt."""
        for parameter in self._parameters:
            parameter.grad = None

    def add(self) -> None:
        """Add the earlier ones to those of the attempt that has succeeded."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if parameter.grad is None:
                parameter.grad = earlier
            elif earlier is not None:
                parameter.grad = earlier + parameter.grad

    def put_back(self) -> None:
        """Leave the earlier ones alone, after an error that ends the training."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier


def copy_of(weighing: Any) -> Any:
    """Return how a group's parts weigh, as it is before the next batch."""
    made = copy.copy(weighing)
    if made is not None and "left" in vars(made):
        made.left = dict(made.left)
    return made
