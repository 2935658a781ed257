"""Changing how many batches make one update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fitkit.arguments import check_count, describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.errors import ArgumentTypeError, ConfigurationError


class GradientAccumulationScheduler(Callback):
    """Sets, from given epochs on, how many batches' gradients make one update.

    Args:
        scheduling: epoch (from 0) → number of batches: `{0: 8, 4: 2}` accumulates 8 batches
            in the epochs 0 to 3, then 2. Epochs before the first one keep what compile was
            given as `accumulate_grad_batches`, and so do later fits.

    Raises:
        ConfigurationError, ArgumentTypeError: an empty dict, epochs below 0, numbers below 1.
    """

    stops_alike = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not isinstance(scheduling, Mapping):
            raise ArgumentTypeError(
                f"scheduling={describe(scheduling)} must be a dict of epochs and numbers of "
                "batches, like {0: 8, 4: 2}."
            )
        if not scheduling:
            raise ConfigurationError("scheduling={} has no epoch; write it like {0: 8, 4: 2}.")
        for epoch, number in scheduling.items():
            check_count("scheduling's epoch", epoch, minimum=0)
            check_count(f"scheduling[{epoch}]", number)
        self.scheduling = dict(sorted(scheduling.items()))

    def batches_in(self, epoch: int) -> int | None:
        """How many batches make an update in that epoch; None where it isn't said."""
        begun = [number for first, number in self.scheduling.items() if first <= epoch]
        return begun[-1] if begun else None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        number = self.batches_in(epoch)
        if number is not None:
            state: Any = self.model._fitkit.fit_state
            state.accumulate = number
