"""Whether an optimizer's step needs the function that computes the loss again (its closure)."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from fitkit.optimizer_copies import with_inner

NAME = "closure"


def uses_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` can't do without a closure.

    Torch's optimizers call one only if it isn't None, at their beginning, to return the loss. Such
    a step needs none. But SAM calls its closure at other weights, and LBFGS several times. What a
    step does when its closure is None is followed through its code: it needs one if it uses the
    closure there, or if it then never returns. Code that can't be followed is taken to need one,
    which is always right and costs more.
    """
    return _uses(optimizer, type(optimizer).__mro__)


def _uses(optimizer: Optimizer, kinds: tuple[type, ...]) -> bool:
    """Whether the first of these classes with a step of its own uses its closure."""
    for number, kind in enumerate(kinds):
        if kind is Optimizer:
            break
        if "step" in vars(kind):
            step: Any = vars(kind)["step"]
            parameter = inspect.signature(step).parameters.get(NAME)
            if parameter is None:
                return False
            if parameter.default is inspect.Parameter.empty:
                return True
            if kind.__module__.startswith("torch.optim."):
                return False
            from fitkit.extras.bytecode import use_of_none

            use = use_of_none(getattr(inspect.unwrap(step), "__code__", None), NAME)
            if use == "handed on":
                inner = with_inner([optimizer])[1:]
                return _uses(optimizer, kinds[number + 1 :]) or any(map(uses_closure, inner))
            return use != "none"
    return False
