"""From a batch's loss to new weights: backward, accumulation, clipping, the optimizer's step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.distributed.precision import CLOSURE, Scaling
from fitkit.distributed.strategies import Strategy
from fitkit.distributed.strategies.engine import clip_gradients, scale_gradients
from fitkit.errors import ConfigurationError
from fitkit.losses import Count, Term
from fitkit.losses.compiled import total_of
from fitkit.optimizers import needs_closure, unfuse_if_unreadable
from fitkit.training.optimizing import FitState

TINY = torch.finfo(torch.float64).tiny

Ahead = Callable[[int], list[list[float]]]
"""Gives what each output's loss will be the mean over in so many batches that come next."""


def nothing_if(loss: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
    """A part's loss; 0 where it is the mean over nothing, which is NaN."""
    if isinstance(count, torch.Tensor):
        return torch.where(count > 0, loss, torch.zeros_like(loss))
    return loss if count else loss.nan_to_num(0.0, 0.0, 0.0)


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
        outside: those of the parameters that aren't the module's but a loss's: their gradients are
            averaged here, since no strategy knows of them.

    An update is that of all its batches as one, over all ranks: each batch's gradients weigh by
    what its loss is the mean over (its samples, or the labels that count in it), also where
    batches differ in length or the last group is short. How much counts on the other ranks is
    known after the exchange of gradients only: it travels with them where the strategy has a
    `count_carrier`, else it costs an exchange an update.

    Attributes:
        backward: computes the gradients of a loss.
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
        outside: list[torch.nn.Parameter] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._looks_at_gradients = is_named
        engine = self._engine = strategy.engine
        self._fit_state = fit_state
        self._strategy = strategy
        self._ranks = strategy.shares.world_size
        self.backward = torch.Tensor.backward if engine is None else engine.backward
        self._scaling = scaling
        if scaling is not None:
            self.backward = partial(scaling.backward, through=self.backward)
        self._clip_gradients = clip_gradients if engine is None else engine.clip
        self._scale_gradients = scale_gradients if engine is None else engine.scale
        self._parameters = parameters
        fit_state.accumulate = accumulate
        self._clip_value = clip_value
        self._clip_algorithm = clip_algorithm
        self._after_update = after_update
        self._batches = 0  # of the group so far
        self._samples = 0  # of the group so far, on all ranks
        self._counted: Any = None  # of the group so far, on this rank; None where samples count
        self._per_sample: float | None = None  # what counts in a sample, roughly: a power of 2
        self._totals: list[float] | None = None  # of the group and each output, on all ranks
        self._first = 1  # samples of the group's first step, on all ranks
        self._exchanges = exchanges
        # What takes a count along with the gradients; those that go past the wrapper have none.
        self._carrier = None if exchanges else strategy.count_carrier
        self._outside = [] if self._ranks == 1 else outside or []
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
            if self._carrier is not None:
                self._carrier.grad = None

    def around_step(self) -> AbstractContextManager[Any]:
        """Surrounds a step: within a group gradients aren't exchanged before its last batch."""
        if self._batches + 1 < self._accumulate:
            self._exchanged = False
            return self._strategy.accumulating()
        self._exchanged = not self._exchanges
        return contextlib.nullcontext()

    @property
    def sees_parts(self) -> bool:
        """Whether a batch is only a part of what an update sees."""
        return self._ranks > 1 or self._accumulate > 1

    def step(self, loss: torch.Tensor, samples: int, total: int, count: Count = None) -> None:
        """Take a batch's loss.

        Args:
            loss: the mean over what counts on this rank.
            samples: of this rank's batch; 0 for one that counts for nothing.
            total: of all ranks' batches. Each sample weighs the same, on whichever rank.
            count: what the loss is the mean over; None for the samples.
        """
        if count is not None or self._carrier is not None:
            self._step_counted(loss, samples if count is None else count, total)
            return
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

    def _step_counted(self, loss: torch.Tensor, count: float | torch.Tensor, total: int) -> None:
        """Take a batch's loss that is the mean over `count`, which differs between batches."""
        if self._accumulate == 1 and self._ranks == 1:
            self.backward(loss)
            self._update()
            return
        if self._batches == 0:
            self._first, self._samples, self._counted = max(total, 1), 0, 0
            if self._per_sample is None:
                self._per_sample = self._guess(count, total)
        expected = self._first * self._accumulate * (self._per_sample or 1.0)
        self._backward_part(loss, count, count * (self._ranks / expected))
        self._batches += 1
        self._samples += total
        self._counted = self._counted + count
        if self._batches == self._accumulate:
            self.finish()

    def _guess(self, count: float | torch.Tensor, total: int) -> float:
        """What counts in a sample, roughly, so that gradients have their size from the beginning.

        A power of 2: it rounds nothing, so a resumed training has the same bits with another.

        Ranks:
            Collective: once a fit.
        """
        (whole,) = self._strategy.shares.sums([float(count)])
        return 2.0 ** round(math.log2(whole / total)) if whole > 0 and total else 1.0

    def step_terms(self, terms: list[Term], samples: int, total: int, ahead: Ahead) -> None:
        """Take the losses of a batch's several outputs, each the mean over something else.

        One factor can't put these right afterwards, so what counts is found out before.

        Args:
            terms: the outputs' losses.
            samples, total: as for `step`.
            ahead: gives what counts in the group's batches that are still to come.
        """
        counts = [samples if term.count is None or not samples else term.count for term in terms]
        if self._accumulate == 1 and self._ranks == 1:
            self.backward(total_of(terms))
            self._update()
            return
        if self._totals is None:
            rest = ahead(self._accumulate - 1) if self._accumulate > 1 else []
            sums = [sum(map(float, column)) for column in zip(counts, *rest, strict=True)]
            self._totals = self._strategy.shares.sums(sums)
        weighed = [
            nothing_if(term.value, count) * (term.scale * count * self._ranks / max(whole, TINY))
            for term, count, whole in zip(terms, counts, self._totals, strict=True)
        ]
        self._backward_part(functools.reduce(torch.add, weighed), 1.0, 1.0)
        self._batches += 1
        if self._batches == self._accumulate:
            self.finish()

    def _backward_part(
        self, loss: torch.Tensor, count: float | torch.Tensor, share: float | torch.Tensor
    ) -> None:
        """Compute the gradients of a part of a group, and let what counts in it go with them."""
        loss, carrier = nothing_if(loss, count), self._carrier
        if carrier is None:
            self.backward(loss * share)
            return
        if self._scaling is not None:
            loss = self._scaling.scaler.scale(loss)
        # The same as a backward of loss * share + carrier * count, without the operations.
        weighs = torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
        counts = torch.as_tensor(count, dtype=carrier.dtype, device=carrier.device)
        torch.autograd.backward((loss, carrier), (weighs, counts))

    def finish(self) -> None:
        """Make the update of a group that is complete, or that the epoch's end cuts short."""
        if self._batches == 0:
            return
        self._batches = 0
        if not self._exchanged:
            carriers = [] if self._carrier is None else [self._carrier]
            self._strategy.exchange_gradients([*self._parameters, *carriers])
        # … and put right here, where it is known how much counts in the whole group.
        expected, found = float(self._first * self._accumulate), self._samples
        if self._totals is not None:
            expected, found = 1.0, 1
        elif self._counted is not None:
            expected, found = expected * (self._per_sample or 1.0), self._counted_by_all()
        self._totals = self._counted = None
        if isinstance(found, torch.Tensor):
            factor = torch.where(found > 0, expected / found, 1.0)
            self._scale_gradients(self._parameters, factor)
        elif found != expected:
            self._scale_gradients(self._parameters, expected / found if found else 1.0)
        self._update()

    def _counted_by_all(self) -> Any:
        """How much counts in the group, over all ranks: a number, or a tensor on a GPU."""
        if self._ranks == 1:
            return self._counted
        carrier = self._carrier
        if carrier is None:
            return self._strategy.shares.sums([float(self._counted)])[0]
        assert carrier.grad is not None  # a mean over the ranks
        # Whole numbers are that again; what else counts (classes' weights) stays as it is.
        if carrier.is_cpu:
            number = carrier.grad.item() * self._ranks
            return round(number) if abs(number - round(number)) < 1e-6 * number else number
        whole = carrier.grad.double() * self._ranks
        rounded = whole.round()
        return torch.where((whole - rounded).abs() < 1e-6 * rounded, rounded, whole)

    def step_with_closure(
        self,
        loss: torch.Tensor,
        again: Callable[[], torch.Tensor],
        samples: int,
        total: int,
        count: Count = None,
    ) -> None:
        """An update by an optimizer that computes the loss itself, as often as it likes.

        Args:
            loss: the first evaluation.
            again: gives the loss once more, at changed weights.
            samples, total, count: as for `step`.
        """
        mine, whole = float(samples), float(max(total, 1))
        if count is not None and self._ranks > 1:
            mine = float(count)
            whole = max(*self._strategy.shares.sums([mine]), TINY)
        waiting, share = [loss], mine * self._ranks / whole

        def closure() -> torch.Tensor:
            with torch.enable_grad():
                value = waiting.pop() if waiting else again()
                for parameter in self._parameters:
                    parameter.grad = None
                if self._carrier is not None:
                    self._carrier.grad = None
                self._backward_part(value, mine, share)
                if self._exchanges:
                    self._strategy.exchange_gradients(self._parameters)
                if self._outside:
                    self._strategy.shares.mean_gradients(self._outside)
            self._clip()
            if self._ranks == 1:
                return value.detach()
            # The optimizer decides by this number when to stop: it must be the same on all ranks.
            (summed,) = self._strategy.shares.sums([nothing_if(value, mine).item() * mine])
            return value.detach().new_tensor(summed / whole)

        self.optimizer.step(closure)  # type: ignore[arg-type]
        if self._engine is not None:
            self._engine.after_update()
        self._count_update()

    def _update(self) -> None:
        if self._outside:
            self._strategy.shares.mean_gradients(self._outside)
        if self._looks_at_gradients:
            self._looks_at_gradients = False
            unfuse_if_unreadable(self.optimizer)
        if self._scaling is not None:
            self._update_scaled(self._scaling)
            return
        self._clip()
        if self._engine is None:
            self.optimizer.step()
        else:
            self._engine.update(self.optimizer)
            self._engine.after_update()
        self._count_update()

    def _update_scaled(self, scaling: Scaling) -> None:
        """An update that is left out where gradients aren't finite."""
        if self._clip_value is not None:
            scaling.unscale(self.optimizer, self._parameters)
            self._clip()
        counts = scaling.step(self.optimizer)
        scaling.update()
        if self._engine is not None:
            self._engine.after_update()  # Also when left out: other ranks may have made theirs.
        if counts:
            self._count_update()

    def _count_update(self) -> None:
        self._fit_state.updates += 1
        if self._after_update is not None:
            self._after_update()

    def _clip(self) -> None:
        if self._clip_value is not None:
            self._clip_gradients(self._parameters, self._clip_value, self._clip_algorithm)
