"""From a batch's loss to new weights: backward, accumulation, clipping, the optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.distributed.precision import CLOSURE, Scaling
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError
from fitkit.optimizers import needs_closure, unfuse_if_unreadable
from fitkit.training.fit_state import FitState


class Updater:
    """Turns losses into updates of the weights.

    Args:
        strategy: computes the gradients.
        fit_state: counts the updates.
        optimizer: makes the update.
        parameters: all that may learn; their gradients are cleared before an update's first
            batch.
        accumulate: batches whose gradients make one update, to begin with; callbacks change it
            in `fit_state.accumulate`, from the next group on.
        clip_value: limit of the gradients' norm or values; None for none.
        clip_algorithm: `"norm"` (of all gradients together) or `"value"` (each entry).
        after_update: called after each update (a scheduler that counts steps).
        scaling: scales losses, where half precision needs that; None elsewhere.
        is_named: whether fitkit chose the optimizer's way to compute.
        exchanges: whether gradients are averaged over the ranks here, because the steps go past
            the wrapper that does it otherwise.

    Accumulated gradients are the mean over all samples of the group, as one larger batch's
    would be, also where batches differ in length or the last group is short.

    Attributes:
        backward: computes the gradients of a loss.
        is_scaled: whether losses are scaled.
        takes_closure: whether the optimizer computes the loss itself.
        accumulates: whether several batches make an update.
    """

    def __init__(
        self,
        strategy: Strategy,
        fit_state: FitState,
        optimizer: Optimizer,
        parameters: list[torch.nn.Parameter],
        *,
        accumulate: int = 1,
        clip_value: float | None = None,
        clip_algorithm: str = "norm",
        after_update: Callable[[], Any] | None = None,
        exchanges: bool = False,
        scaling: Scaling | None = None,
        is_named: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._looks_at_gradients = is_named
        # An engine's own update; torch's is called directly.
        self._engine_update = (
            strategy.update if type(strategy).update is not Strategy.update else None
        )
        self._fit_state = fit_state
        self._strategy = strategy
        self._ranks = strategy.shares.world_size
        self.backward = strategy.backward
        self.is_scaled = scaling is not None
        self._scaling = scaling
        if scaling is not None:
            self.backward = partial(scaling.backward, through=strategy.backward)
        self._parameters = parameters
        fit_state.accumulate = accumulate
        self._clip_value = clip_value
        self._clip_algorithm = clip_algorithm
        self._after_update = after_update
        acts = type(strategy).after_update is not Strategy.after_update
        self._after_weights = strategy.after_update if acts else None
        self._batches = 0  # of the group so far
        self._samples = 0  # of the group so far
        self._first = 1  # samples of the group's first step, on all ranks
        self._exchanges = exchanges
        self.takes_closure = needs_closure(optimizer)
        if self.takes_closure and scaling is not None:
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        self._regroup(accumulate)

    def _regroup(self, accumulate: int) -> None:
        """Take another number of batches for an update; between two groups."""
        if self.takes_closure and accumulate > 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={accumulate} can't be combined with "
                f"{type(self.optimizer).__name__}, which computes the loss several times a step."
            )
        self._accumulate = accumulate
        self._exchanged = not self._exchanges
        self.accumulates = accumulate > 1

    @property
    def is_between_groups(self) -> bool:
        """Whether no batch waits for others to make an update with it."""
        return self._batches == 0

    def clear(self) -> None:
        """Drop the gradients, unless a group of batches is being accumulated."""
        if self._batches == 0:
            if self._accumulate != self._fit_state.accumulate:
                self._regroup(self._fit_state.accumulate)
            for parameter in self._parameters:
                parameter.grad = None

    def around_step(self) -> AbstractContextManager[Any]:
        """Surrounds a step: within a group gradients aren't exchanged before its last batch."""
        if self._batches + 1 < self._accumulate:
            self._exchanged = False
            return self._strategy.accumulating()
        self._exchanged = not self._exchanges
        return contextlib.nullcontext()

    def step(self, loss: torch.Tensor, samples: int, total: int) -> None:
        """Take a batch's loss.

        Args:
            loss: the mean over this rank's samples.
            samples: of this rank's batch; 0 for one that counts for nothing.
            total: of all ranks' batches. Each sample weighs the same, on whichever rank.
        """
        if self._accumulate == 1:
            share = samples * self._ranks
            self.backward(loss if share == total else loss * (share / total))
            if self._exchanges:
                self._strategy.exchange_gradients(self._parameters)
            self._update()
            return
        if self._batches == 0:
            self._first = max(total, 1)
            self._samples = 0
        # Scaled as if every step of the group had as many samples as its first …
        self.backward(loss * (samples * self._ranks / (self._first * self._accumulate)))
        self._batches += 1
        self._samples += total
        if self._batches == self._accumulate:
            self.finish()

    def finish(self) -> None:
        """Make the update of a group that is complete, or that the epoch's end cuts short."""
        if self._batches == 0:
            return
        # … and put right here, where the group's true number of samples is known.
        expected = self._first * self._accumulate
        self._batches = 0
        if not self._exchanged:
            self._strategy.exchange_gradients(self._parameters)
        if self._samples != expected:
            self._strategy.scale_gradients(self._parameters, expected / max(self._samples, 1))
        self._update()

    def step_with_closure(
        self, loss: torch.Tensor, again: Callable[[], torch.Tensor], samples: int, total: int
    ) -> None:
        """An update by an optimizer that computes the loss itself, as often as it likes.

        Args:
            loss: the first evaluation.
            again: gives the loss once more, at changed weights.
            samples, total: as for `step`.
        """
        waiting, share = [loss], samples * self._ranks / max(total, 1)

        def closure() -> torch.Tensor:
            with torch.enable_grad():
                value = waiting.pop() if waiting else again()
                for parameter in self._parameters:
                    parameter.grad = None
                self.backward(value if share == 1 else value * share)
                if self._exchanges:
                    self._strategy.exchange_gradients(self._parameters)
            self._clip()
            if self._ranks == 1:
                return value.detach()
            # The optimizer decides by this number when to stop: it must be the same on all ranks.
            (whole,) = self._strategy.shares.sums([value.item() * samples])
            return value.detach().new_tensor(whole / max(total, 1))

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self._tell_strategy()
        self._count_update()

    def follow(self) -> None:
        """Make an update whose gradients other replicas have computed."""
        self._update()

    @property
    def will_accumulate(self) -> bool:
        """Whether the next batch is, or becomes, one of several for an update."""
        return self._fit_state.accumulate > 1 or self._batches > 0

    def _update(self) -> None:
        if self._looks_at_gradients:
            self._looks_at_gradients = False
            unfuse_if_unreadable(self.optimizer)
        if self._scaling is not None:
            self._update_scaled(self._scaling)
            return
        self.apply()
        self.count()

    def apply(self) -> None:
        """Clip the gradients and make the optimizer's step."""
        self._clip()
        if self._engine_update is None:
            self.optimizer.step()
        else:
            self._engine_update(self.optimizer)

    def count(self) -> None:
        """Count an update that was made, and move what counts them."""
        self._tell_strategy()
        self._count_update()

    def _update_scaled(self, scaling: Scaling) -> None:
        """An update that is left out where gradients aren't finite."""
        if self._clip_value is not None:
            scaling.unscale(self.optimizer, self._parameters)
            self._clip()
        counts = scaling.step(self.optimizer)
        scaling.update()
        self._tell_strategy()  # Also of an update left out: other ranks may have made theirs.
        if counts:
            self._count_update()

    def _tell_strategy(self) -> None:
        if self._after_weights is not None:
            self._after_weights()

    def _count_update(self) -> None:
        self._fit_state.updates += 1
        if self._after_update is not None:
            self._after_update()

    def _clip(self) -> None:
        if self._clip_value is not None:
            self._strategy.clip_gradients(self._parameters, self._clip_value, self._clip_algorithm)
