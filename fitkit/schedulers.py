"""Learning-rate schedulers from names, classes, partials, factories and instances."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from fitkit.arguments import check_choice, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.optimizers import shown
from fitkit.registry import Registry

SCHEDULERS: Registry[Any] = Registry(
    "lr_scheduler", hint="Or give a class, a functools.partial, a factory or an instance."
)
for _name, _class in vars(lr_scheduler).items():
    if (
        isinstance(_class, type)
        and issubclass(_class, lr_scheduler.LRScheduler)
        and _class is not lr_scheduler.LRScheduler
        and not _name.startswith("_")
    ):
        _short = _name.removesuffix("LR")
        SCHEDULERS.add(_name, _class, *([_short] if _short != _name else []))
SCHEDULERS.add("cosine", lr_scheduler.CosineAnnealingLR)

_LENGTHS = ("T_max", "total_steps", "total_iters")
"""Arguments of schedulers that say how long the training is; `fit` knows it."""


@dataclasses.dataclass(frozen=True)
class SchedulerChoice:
    """What `compile` was told about the scheduler.

    Attributes:
        given: name, class, partial, factory `optimizer -> scheduler`, or instance.
        interval: `"epoch"` or `"step"` (each update of the optimizer).
        monitor: the log that `ReduceLROnPlateau` watches; None for `val_loss` where there is
            a validation, else `loss`.
    """

    given: Any
    interval: str = "epoch"
    monitor: str | None = None

    @classmethod
    def read(cls, value: Any) -> SchedulerChoice | None:
        """The choice in `compile`'s argument; None stays None.

        Raises:
            ConfigurationError, ArgumentTypeError: words that mean nothing.
        """
        if value is None:
            return None
        if isinstance(value, dict):
            unknown = set(value) - {"scheduler", "interval", "monitor"}
            if unknown or "scheduler" not in value:
                raise ConfigurationError(
                    f"lr_scheduler has the keys {sorted(value)}; it takes 'scheduler' (which "
                    "must be there), 'interval' and 'monitor'."
                )
            given, monitor = value["scheduler"], value.get("monitor")
            interval = value.get("interval") or _own_interval(given)
        else:
            given, monitor, interval = value, None, _own_interval(value)
        check_choice("lr_scheduler's interval", interval, ("epoch", "step"))
        if isinstance(given, str):
            SCHEDULERS[given]
        elif not (callable(given) or _is_scheduler(given)):
            raise ArgumentTypeError(
                f"lr_scheduler={describe(given)} must be a name, a class, a functools.partial, a "
                "factory optimizer -> scheduler, or an instance."
            )
        return cls(given, interval, monitor)

    def build(self, optimizer: Optimizer, epochs: int, updates: int | None) -> Any:
        """The scheduler over `optimizer`.

        Args:
            epochs: of the whole training.
            updates: of the whole training; None where unknown.

        Raises:
            ConfigurationError: an instance over another optimizer, or missing arguments.
        """
        if _is_scheduler(self.given):
            if getattr(self.given, "optimizer", optimizer) is not optimizer:
                raise ConfigurationError(
                    "The lr_scheduler instance belongs to another optimizer than this model's. "
                    "Give compile both instances, or the scheduler's class."
                )
            return self.given
        maker = SCHEDULERS[self.given] if isinstance(self.given, str) else self.given
        length = epochs if self.interval == "epoch" else updates
        options = self._lengths(maker, optimizer, length) if isinstance(maker, type) else {}
        try:
            scheduler = maker(optimizer, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"lr_scheduler={shown(self.given)} could not be made: {error}. Give its "
                f"arguments with functools.partial({_class_name(maker)}, …)."
            ) from error
        if not _is_scheduler(scheduler):
            raise ArgumentTypeError(
                f"lr_scheduler={shown(self.given)} gave a {type(scheduler).__name__}, not a "
                "scheduler."
            )
        return scheduler

    def _lengths(self, maker: Any, optimizer: Optimizer, length: int | None) -> dict[str, Any]:
        """The arguments that follow from the training's length."""
        options: dict[str, Any] = {}
        accepted = inspect.signature(maker).parameters
        if length is None:
            return options
        for name in _LENGTHS:
            # LinearLR's and ConstantLR's own default is a warm-up of a few steps: kept.
            required = name in accepted and accepted[name].default is inspect.Parameter.empty
            if required or (name == "total_steps" and name in accepted):
                options[name] = length
        if maker is lr_scheduler.PolynomialLR:
            options["total_iters"] = length
        if "max_lr" in accepted and maker is lr_scheduler.OneCycleLR:
            options["max_lr"] = [group["lr"] for group in optimizer.param_groups]
        return options


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, lr_scheduler.LRScheduler) or (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and callable(getattr(value, "state_dict", None))
    )


def _own_interval(given: Any) -> str:
    """OneCycleLR and CyclicLR count steps by their nature; the others epochs by habit."""
    maker = given
    if isinstance(given, str) and given in SCHEDULERS:
        maker = SCHEDULERS[given]
    if isinstance(given, functools.partial):
        maker = given.func
    if not isinstance(maker, type):
        maker = type(maker)
    return "step" if maker in (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR) else "epoch"


def _class_name(maker: Callable[..., Any]) -> str:
    return getattr(maker, "__qualname__", type(maker).__name__)
