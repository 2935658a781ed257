"""What callbacks read and set of a model's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from fitkit.errors import ConfigurationError
from fitkit.optimizers import put_rate

if TYPE_CHECKING:
    from fitkit.model import Model


def optimizers_of(model: Model) -> list[Optimizer]:
    """The model's optimizers, in order."""
    found = model.optimizers()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def groups_of(model: Model) -> Iterator[dict[str, Any]]:
    """The parameter groups of all optimizers, in order."""
    for optimizer in optimizers_of(model):
        yield from optimizer.param_groups


def rate_of(model: Model) -> float:
    """The learning rate: the first group's, where there are several."""
    return float(next(groups_of(model))["lr"])


def set_rate(model: Model, rate: float) -> None:
    """Give the first group that rate; the others keep their ratio to it.

    A ratio to a rate of 0 isn't known: all groups get the same rate then.
    """
    before = rate_of(model)
    if before == rate:
        return
    for index, group in enumerate(groups_of(model)):
        own = float(group["lr"])
        put_rate(group, rate if index == 0 or own == before or not before else own / before * rate)


def change_rates(model: Model, change: Callable[[float], float]) -> bool:
    """Replace each group's rate by what a function makes of it; whether any differs now."""
    differs = False
    for group in groups_of(model):
        before = float(group["lr"])
        after = change(before)
        if after != before:
            put_rate(group, after)
            differs = True
    return differs


def updates_of(model: Model) -> int:
    """How many updates the model's weights have had."""
    return int(model._fitkit.fit_state.updates)


def refuse_scheduler(model: Model, callback: str) -> None:
    """Refuse two that set the same rates.

    Raises:
        ConfigurationError: there is a learning-rate scheduler.
    """
    if model._fitkit.fit_state.schedulers:
        raise ConfigurationError(
            f"{callback} sets the learning rate, and so does the lr_scheduler. Keep one of them: "
            "leave the callback out, or write model.compile(lr_scheduler=None)."
        )
