"""What counts in an update, summed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fitkit.accelerators import widest_dtype
from fitkit.distributed.collectives import Collectives
from fitkit.training.weighing import Number, about


class Tally:
    """Sums the counts of an update over the ranks, in an exchange of its own.

    Args:
        ranks: those that see different data.

    Attributes:
        is_carried: whether the counts travel with the gradients, in every update.
        parameters: what the ranks average together with the gradients; empty if nothing more.
    """

    is_carried = False
    parameters: Sequence[nn.Parameter] = ()

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._per_sample: float | None = None

    def per_sample(self, count: Number, samples: int) -> float:
        """Return what a sample counts for, about, from the first part that is asked about.

        Ranks:
            Collective, once in a fit.
        """
        if self._per_sample is None:
            (whole,) = self._ranks.sums([float(count)])
            self._per_sample = about(whole, samples)
        return self._per_sample

    def joined(self, loss: torch.Tensor, count: Number) -> torch.Tensor:
        """Return the loss of a part, whose backward adds its count if counts are carried."""
        return loss

    def over_ranks(self, count: Number) -> Number:
        """Return the count of all ranks.

        Ranks:
            Collective, unless counts are carried.
        """
        return count if self._ranks.world_size == 1 else self._ranks.sums([float(count)])[0]


class CarriedTally(Tally):
    """Sums them without an exchange: a count is the gradient of one parameter more.

    An exchange of its own would cost 0.3 ms of each step (gloo, two ranks), and let each rank wait
    for the slowest between its forward and its backward. And a `training_step` may give a count on
    some ranks only.

    Args:
        ranks: those that see different data.
        carrier: the parameter (`WrappedModel.count_parameter`).
        by_hand: whether the training loop averages gradients, not a wrapper that waits for the
            parameter's part in each backward.
    """

    is_carried = True

    def __init__(self, ranks: Collectives, carrier: nn.Parameter, *, by_hand: bool) -> None:
        super().__init__(ranks)
        self._carrier, self._by_hand = carrier, by_hand
        self.parameters: Sequence[nn.Parameter] = [carrier]

    def joined(self, loss: torch.Tensor, count: Number) -> torch.Tensor:
        carrier = self._carrier  # which is 0
        if self._by_hand:
            counts = torch.as_tensor(count, dtype=carrier.dtype, device=carrier.device)
            carrier.grad = counts if carrier.grad is None else carrier.grad + counts
            return loss
        if isinstance(count, torch.Tensor):
            return loss + carrier * count
        return torch.add(loss, carrier, alpha=count)

    def over_ranks(self, count: Number) -> Number:
        carrier, ranks = self._carrier, self._ranks.world_size
        assert carrier.grad is not None  # a mean over the ranks
        # Round what should be a whole number. Other counts (sums of class weights) stay.
        if carrier.is_cpu:
            number = carrier.grad.item() * ranks
            return round(number) if abs(number - round(number)) < 1e-6 * number else number
        whole = carrier.grad.to(widest_dtype(carrier.device)) * ranks
        rounded = whole.round()
        return torch.where((whole - rounded).abs() < 1e-6 * rounded, rounded, whole)
