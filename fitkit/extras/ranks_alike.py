"""Whether ranks that must learn alike still do, looked at where epochs end.

Ranks average their gradients, and each makes the update itself. So their weights stay the same only
as long as each changes rates, parameters and steps alike. A user's code can decide by a value of
its rank's own: a loss, a random number. Nothing fails then, and the weights drift apart.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from fitkit.errors import warn
from fitkit.extras.rate_callbacks import groups_of
from fitkit.seams.callbacks import Callback, Logs, from_all_ranks
from fitkit.tensors import is_whole

WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that have so many bytes."""

WEIGHTS = "the weights"
"""With a name, the word for them."""


class RanksAlike(Callback):
    """Warns once, on rank 0, at the end of the first epoch after which ranks differ.

    Compared are the learning rates, `global_step`, which parameters learn, and the weights bit by
    bit. A strategy with an engine of its own may keep ranks apart, so it is left alone.

    Ranks:
        Collective: one exchange of a few bytes at an epoch's end; one more where they differ.
    """

    stops_alike = True
    comes_last = True

    def __init__(self) -> None:
        self.has_told: bool = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.has_told = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        strategy = self.model._fitkit.compilation.strategy
        if self.has_told or strategy.engine is not None:
            return
        facts = self._facts()
        digests = from_all_ranks(self.model, hashlib.blake2b(repr(facts).encode()).digest())
        rank = next((rank for rank, one in enumerate(digests) if one != digests[0]), 0)
        if not rank:
            return
        self.has_told = True
        speaks = self.model.global_rank in (0, rank)
        ranks = from_all_ranks(self.model, facts if speaks else None)
        if self.model.is_global_zero:
            found = _difference(ranks[0] or {}, ranks[rank] or {}, rank)
            warn(
                f"The ranks differ since epoch {epoch + 1}: {found}. They average gradients, and "
                "each makes the updates itself, so weights drift apart where a rank changes what "
                "others don't. Some code decides by a value that is its rank's own, like the loss "
                "of its batch or a random number. Decide by that of all ranks: "
                "self.all_gather(value).mean(), or self.log(…, sync_dist=True)."
            )

    def _facts(self) -> dict[str, Any]:
        """Return what should be the same on all ranks, by what it is."""
        model = self.model
        facts: dict[str, Any] = {
            f"the learning rate of group {number}": float(group["lr"])
            for number, group in enumerate(groups_of(model))
        }
        facts["global_step"] = model.global_step
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            facts[f"requires_grad of {name}"] = parameter.requires_grad
        strategy = model._fitkit.compilation.strategy
        if callable(getattr(strategy, "comm_hook", None)):  # it may average otherwise
            return facts
        apart = getattr(model._weights_module(), "_ddp_params_and_buffers_to_ignore", ())
        sums = {
            name: _sum_of_bits(parameter)
            for name, parameter in named.items()
            if _is_compared(parameter) and not name.endswith(tuple(apart))
        }
        if sums:
            device = next(iter(sums.values())).device
            numbers = torch.stack([one.to(device) for one in sums.values()]).tolist()
            facts.update(zip((f"{WEIGHTS} {name}" for name in sums), numbers, strict=True))
        return facts


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """Return in words the first fact in which a rank differs from rank 0."""
    for what, value in first.items():
        if repr(value) == repr(other.get(what)):  # NaN, too
            continue
        if what.startswith(WEIGHTS):
            return f"{what} are others on rank {rank} than on rank 0"
        return f"{what} is {value} on rank 0 and {other.get(what)} on rank {rank}"
    return f"rank {rank} has other parameters than rank 0"


def _is_compared(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers on each rank whose bits can be summed."""
    return is_whole(tensor) and tensor.element_size() in WHOLE_NUMBERS and not tensor.is_complex()


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's numbers, read as integers: exact in any order."""
    bits = tensor.detach().view(WHOLE_NUMBERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)
