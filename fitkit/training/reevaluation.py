"""An update's loss as a function, for optimizers that compute it again (SAM, LBFGS).

`Update` computes the gradients as for all optimizers. Then it makes the step with a closure. If the
optimizer calls it before it changes a weight, that was the first evaluation. Otherwise the same
batches are computed again, with the same weights in the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fitkit.data.batches import Batch
from fitkit.distributed.in_place import is_spread
from fitkit.training.step import Outcome
from fitkit.training.weighing import Weighing


class Reevaluation:
    """Notes what an update is made of, for its closure.

    Attributes:
        parts: the batches of the update so far, each with what computes it again.
        total: the sum of their losses as they entered the backward. Over the ranks, its mean is
            the update's loss.
        group: how they weighed; None for a single batch.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last update."""
        self.parts: list[tuple[Batch, Callable[[], Outcome]]] = []
        self.total: torch.Tensor | None = None
        self.group: Weighing | None = None

    def add(self, loss: torch.Tensor) -> None:
        """Add a part's loss to the total."""
        self.total = loss.detach() if self.total is None else self.total + loss.detach()


class Evaluated:
    """The gradients of some parameters, and whether they still belong to the weights.

    A write past torch's counters, as by `p.data`, shows in the weights' norms.
    """

    @torch.no_grad()
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions = [parameter._version for parameter in parameters]
        self._norms = _norms(parameters)
        self._gradients = [
            (parameter, parameter.grad, parameter.grad._version)
            for parameter in parameters
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def still_holds(self) -> bool:
        """Whether nothing has changed; gradients that were only let go are put back."""
        gradients = self._gradients
        if self._versions != [parameter._version for parameter in self._parameters] or any(
            gradient._version != version
            or (parameter.grad is not None and parameter.grad is not gradient)
            for parameter, gradient, version in gradients
        ):
            return False
        if self._norms != _norms(self._parameters):
            return False
        for parameter, gradient, _ in gradients:
            parameter.grad = gradient
        return True


def _norms(parameters: list[nn.Parameter]) -> list[float]:
    plain = [p.detach() for p in parameters if not is_spread(p) and p.layout is torch.strided]
    if not plain:
        return []
    norms = torch._foreach_norm(plain)
    found: list[float] = torch.stack([norm.double().to(norms[0].device) for norm in norms]).tolist()
    return found
