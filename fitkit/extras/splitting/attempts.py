"""What a step changes before its update, and how all of it comes back after a failed attempt."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.accelerators import generator_states, set_generator_states
from fitkit.errors import OutOfMemoryError
from fitkit.extras.splitting.refusals import without_rows
from fitkit.random_states import random_state, set_random_state
from fitkit.seams.data import Batch
from fitkit.seams.networks import Module


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


class RandomNumbers:
    """Puts random numbers back: torch's, on the CPU and on the device.

    Python's and NumPy's, too, where a step of the user's draws them in its first batch. Keeping
    those of each batch costs some 70 µs.

    Args:
        device: draws, too, unless it is the CPU.
        of_user: whether the steps are the user's code.
    """

    def __init__(self, device: torch.device, *, of_user: bool) -> None:
        self._devices = [] if device.type == "cpu" else [device]
        self._is_known, self._has_others = not of_user, of_user
        self._others: dict[str, Any] = {}
        self._state_on_cpu = torch.default_generator.get_state  # half of torch.get_rng_state's time

    def note(self) -> None:
        """Keep their states of now."""
        if self._has_others:
            self._others = random_state(devices=self._devices)
        else:
            self._on_cpu = self._state_on_cpu()
            self._on_device = generator_states(self._devices) if self._devices else []

    def restore(self) -> None:
        """Put back what they were."""
        if self._has_others:
            set_random_state(self._others, devices=self._devices)
        else:
            torch.set_rng_state(self._on_cpu)
            set_generator_states(self._devices, self._on_device)

    def end_batch(self) -> None:
        """See by the first batch whether Python's and NumPy's are drawn."""
        if not self._is_known:
            self._is_known = True
            now, before = random_state(devices=self._devices), self._others
            mine, other = now["numpy"]["state"], before["numpy"]["state"]
            is_same = mine["pos"] == other["pos"] and (mine["key"] == other["key"]).all()
            self._has_others = not is_same or now["python"] != before["python"]


class Inputs:
    """Lets attempts compute what a batch holds, whatever a step writes into it.

    A step that wrote into its first batch gets copies from then on. Others get the batch itself.
    """

    def __init__(self) -> None:
        self._writes: bool | None = None  # None before the first batch
        self._versions: list[int] | None = None
        self._original: Any = None

    def note(self, batch: Batch) -> None:
        """Begin a batch."""
        self._versions = None if batch.is_lent or self._writes else _versions_of(batch.data)
        if self._versions is None:
            batch.is_lent = True
        elif self._writes is None:
            self._original = trees.copied(batch.data)

    def restore(self, batch: Batch) -> None:
        """Give the batch what it held.

        Raises:
            OutOfMemoryError: a step wrote into it, and into none before.
        """
        if self._versions is None or not self._have_changed(batch):
            return
        if self._writes is not None:
            raise OutOfMemoryError(without_rows("Its step has written into it, as none before."))
        batch.data, self._writes, self._versions = self._original, True, None

    def end_batch(self, batch: Batch) -> bool:
        """See by the first batch that isn't lent whether steps write; return whether it's known."""
        if self._writes is None and self._versions is not None:
            self._writes = self._have_changed(batch)
        self._original = None
        return self._writes is not None

    def _have_changed(self, batch: Batch) -> bool:
        return _versions_of(batch.data) != self._versions


def _versions_of(data: Any) -> list[int] | None:
    """Return what shows whether anything is written into a batch; None if nothing does."""
    if type(data) is not tuple:
        return None
    found = []
    for one in data:
        if type(one) is not torch.Tensor or one.is_inference():
            return None
        found.append(one._version)
    return found


class Before:
    """What a batch's attempts may change in it, in the model and around it, as it was before.

    Args:
        model: computes the batch.
        of_user: whether the steps are the user's code.

    Attributes:
        buffers: those of the model.
        is_known: whether earlier batches have shown what steps change; `end_batch` sees it.
    """

    def __init__(self, model: Module, *, of_user: bool) -> None:
        compilation = model._fitkit.compilation
        self.buffers: KeptBuffers = KeptBuffers(compilation.trained(model).modules())
        self._random = RandomNumbers(compilation.strategy.device, of_user=of_user)
        self._inputs = Inputs()
        self.is_known: bool = False

    def note(self, batch: Batch) -> None:
        """Keep what is there now."""
        self._random.note()
        self.buffers.note()
        self._inputs.note(batch)

    def restore(self, batch: Batch) -> None:
        """Put it back.

        Raises:
            OutOfMemoryError: a step has written into the batch, and into none before.
        """
        self._random.restore()
        self.buffers.restore()
        self._inputs.restore(batch)

    def end_batch(self, batch: Batch) -> None:
        """See by the first batches what steps change."""
        self._random.end_batch()
        self.is_known = self._inputs.end_batch(batch)


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
