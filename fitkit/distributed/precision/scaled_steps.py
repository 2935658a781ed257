"""Optimizers that a step of the user's own calls, with scaled losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from fitkit.distributed.precision.scaling import Scaling
from fitkit.errors import ConfigurationError

CLOSURE = (
    "{kind} computes the loss itself, several times a step, which precision='16-mixed' can't scale "
    "for it. Write precision='bf16-mixed', or take another optimizer."
)


@contextmanager
def scaled_steps(
    scaling: Scaling, optimizers: Iterable[Optimizer], count: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Let the optimizers' own `step` go through a scaling meanwhile.

    The caller gives the scaling one `update` after each of the user's steps.

    Args:
        count: called after each step that counts as an update.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_scaled(scaling, optimizer, count))
        yield


@contextmanager
def _scaled(scaling: Scaling, optimizer: Optimizer, count: Callable[[], Any]) -> Iterator[None]:
    own = vars(optimizer).get("step")  # a scheduler's, which counts steps
    original: Callable[..., Any] = optimizer.step
    is_inside = False

    @functools.wraps(original)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        nonlocal is_inside
        if closure is not None:
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        if is_inside:  # the scaling's own call
            return original()
        is_inside = True
        try:
            counts = scaling.step(optimizer)
        finally:
            is_inside = False
        if counts:
            count()
        return None

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
