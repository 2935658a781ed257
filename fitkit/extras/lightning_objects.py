"""What a `LightningModule` is handed: its optimizers, and how its schedulers move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from fitkit.extras.lightning_base import Unknown
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


class SchedulerConfig(Unknown):
    """How a scheduler moves, by Lightning's names.

    Args:
        plan: how fitkit moves it.
    """

    KNOWN_AS = "trainer.lr_scheduler_configs[…]"
    SET_BY = "Write it in what configure_optimizers returns."

    def __init__(self, plan: PlannedScheduler) -> None:
        self._plan = plan

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self._plan.scheduler

    @property
    def name(self) -> str | None:
        """The name of its rate in the logs."""
        return self._plan.name

    @property
    def interval(self) -> str:
        """`"epoch"` or `"step"`."""
        found: str = getattr(self._plan, "every", self._plan.interval)
        return found

    @property
    def frequency(self) -> int:
        """It moves once in this many intervals."""
        return self._plan.frequency

    @property
    def reduce_on_plateau(self) -> bool:
        """Whether it watches a value."""
        return self._plan.watches

    @property
    def monitor(self) -> str | None:
        """The name of that value."""
        return self._plan.monitor

    @property
    def strict(self) -> bool:
        """Whether a missing value is an error."""
        return self._plan.strict


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
