"""What callbacks say to their copies on other ranks; one rank asks nobody."""

from __future__ import annotations

from typing import Any, TypeVar

from fitkit.module import Module

Value = TypeVar("Value")


def from_rank_zero(model: Module, value: Value) -> Value:
    """Rank 0's value, so that every rank decides alike.

    Ranks:
        Collective.
    """
    given: Value = model._fitkit.compilation.strategy.collectives.broadcast(value)
    return given


def from_all_ranks(model: Module, value: Value) -> list[Value]:
    """Every rank's value, in rank order.

    Ranks:
        Collective.
    """
    found: list[Value] = model._fitkit.compilation.strategy.collectives.gather(value)
    return found


def share_buffers(model: Module) -> None:
    """Give all ranks the buffers that rank 0 has (running statistics differ between them).

    Ranks:
        Collective.
    """
    model._fitkit.compilation.strategy.before_evaluation(model)


def say(model: Module, text: str) -> None:
    """Print a line, on rank 0 only."""
    if model.is_global_zero:
        print(text, flush=True)


def several_ranks(model: Module) -> bool:
    """Whether there are ranks to talk to."""
    size: int = model._fitkit.compilation.strategy.collectives.world_size
    return size > 1


def any_rank(model: Module, flag: Any) -> bool:
    """Whether `flag` is true on some rank.

    Ranks:
        Collective.
    """
    return any(from_all_ranks(model, bool(flag)))
