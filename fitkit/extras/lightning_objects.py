"""What a `LightningModule` is handed: its optimizers, and how its schedulers move."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from fitkit.seams.optimizers import PlannedScheduler


class HandedOptimizer:
    """An optimizer as `self.optimizers()` and `optimizer_step` give it.

    It has what Lightning's wrapper adds. All else is the optimizer's own, its class among it.

    Args:
        optimizer: the optimizer.
        toggled: called with it, gives a context manager in which only its parameters learn.
        step: what makes its step. Default: its own.

    Attributes:
        optimizer: torch's own object.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        toggled: Callable[[Optimizer], contextlib.AbstractContextManager[None]],
        step: Callable[..., Any] | None = None,
    ) -> None:
        self.optimizer = self._optimizer = optimizer
        self._toggled = toggled
        if step is not None:
            self.step = step

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters need gradients within a block.

        Args:
            sync_grad: of no effect: gradients are averaged at each `manual_backward`, and the mean
                of their sums is the sum of their means.
        """
        with self._toggled(self.optimizer):
            yield

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies torch's own object."""
        return unwrapped, (self.optimizer,)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)


def unwrapped(optimizer: Any) -> Any:
    """Return torch's own object of an optimizer that a module was handed."""
    return optimizer.optimizer if type(optimizer) is HandedOptimizer else optimizer


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """How a scheduler moves, by Lightning's names. Setting one has no effect, so it is an error.

    Attributes:
        scheduler: the scheduler.
        name: of its rate in the logs.
        interval: `"epoch"` or `"step"`.
        frequency: it moves once in this many intervals.
        reduce_on_plateau: whether it watches a value.
        monitor: the value's name.
        strict: whether a missing value is an error.
    """

    scheduler: Any
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool

    @classmethod
    def of(cls, plan: PlannedScheduler) -> SchedulerConfig:
        """Return a plan as a module sees it."""
        return cls(
            scheduler=plan.scheduler,
            name=plan.name,
            interval=getattr(plan, "every", plan.interval),
            frequency=plan.frequency,
            reduce_on_plateau=plan.watches,
            monitor=plan.monitor,
            strict=plan.strict,
        )


def toggled(model: Any) -> Callable[[Optimizer], contextlib.AbstractContextManager[None]]:
    """Return what lets only an optimizer's parameters learn, by the hooks of a model's module."""

    @contextlib.contextmanager
    def only(optimizer: Optimizer) -> Iterator[None]:
        model.net.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            model.net.untoggle_optimizer(optimizer)

    return only
