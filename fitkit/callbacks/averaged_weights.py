"""A second set of a model's weights, averaged over the updates, that can take their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fitkit.distributed.sharding.whole import as_parts

if TYPE_CHECKING:
    from fitkit.model import Model

Average = Callable[[list[torch.Tensor], list[torch.Tensor], int], Any]
"""Moves averages towards current values, given how many were averaged before."""

HALF = (torch.float16, torch.bfloat16)
"""Averages of these are kept in float32: small steps would be rounded away."""


class AveragedWeights:
    """Averages of a model's floating-point parameters and buffers, beside the model.

    Args:
        model: whose weights are averaged; it starts from those that it has now.
        average: in place: (averages, values, number before).
        buffers: whether buffers (running statistics) are averaged too.

    Attributes:
        count: how many were averaged.
    """

    def __init__(self, model: Model, average: Average, *, buffers: bool) -> None:
        named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
        found = {name: tensor for name, tensor in named if tensor.is_floating_point()}
        self.names = list(found)
        self._tensors = list(found.values())
        self._averages = [_widened(tensor).clone() for tensor in self._tensors]
        self._average = average
        self._own: list[torch.Tensor] | None = None
        self.count = 0

    @property
    def is_in_use(self) -> bool:
        """Whether the model has the averages at present."""
        return self._own is not None

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights into the average."""
        assert self._own is None, "the model has the averages themselves"
        by_kind: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for mean, tensor in zip(self._averages, self._tensors, strict=True):
            means, values = by_kind.setdefault((mean.dtype, type(mean)), ([], []))
            means.append(mean)
            values.append(_widened(tensor))
        for means, values in by_kind.values():
            self._average(means, values, self.count)
        self.count += 1

    @torch.no_grad()
    def put_in(self) -> None:
        """Give the model the averages, in place; does nothing where it has them."""
        if self._own is None:
            self._own = [tensor.detach().clone() for tensor in self._tensors]
            for tensor, mean in zip(self._tensors, self._averages, strict=True):
                tensor.copy_(mean)

    @torch.no_grad()
    def take_out(self) -> None:
        """Give the model its own weights back; does nothing where it has them."""
        if self._own is not None:
            for tensor, own in zip(self._tensors, self._own, strict=True):
                tensor.copy_(own)
            self._own = None

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, how many were averaged, and the model's own weights meanwhile."""
        own = None if self._own is None else dict(zip(self.names, self._own, strict=True))
        averages = dict(zip(self.names, self._averages, strict=True))
        return {"count": self.count, "averages": averages, "own": own}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave; the model has the weights that it had then."""
        self.count = int(state["count"])
        for name, mean in zip(self.names, self._averages, strict=True):
            mean.copy_(as_parts(state["averages"][name], mean))
        self._own = None
        if state["own"] is not None:
            self._own = [tensor.detach().clone() for tensor in self._tensors]
            for name, own in zip(self.names, self._own, strict=True):
                own.copy_(as_parts(state["own"][name], own))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.float() if detached.dtype in HALF else detached
