"""The keys under which metrics are logged."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from fitkit.outputs import log_name

_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(class_name: str) -> str:
    """`MulticlassF1Score` → `multiclass_f1_score`."""
    return _WORD_STARTS.sub("_", class_name.replace("IoU", "Iou")).lower()


def callable_name(function: Callable[..., Any]) -> str:
    """A function's name, the name inside a partial, or an object's class in snake case."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return snake_case(type(function).__name__)
    return "lambda" if name == "<lambda>" else name


class LogKeys:
    """Gives each metric a key of its own, as Keras does.

    The second `mae` becomes `mae_1`. A weighted metric whose name a plain one has becomes
    `weighted_mae`. `loss` is taken from the start: a metric of that name becomes `loss_1`.
    """

    def __init__(self, outputs: Iterable[str]) -> None:
        self._taken = {"loss", *(log_name(output, "loss") for output in outputs)}

    def key(self, output: str, name: str, *, weighted: bool = False) -> str:
        """The key of the next metric, which is then taken."""
        if weighted and log_name(output, name) in self._taken:
            name = f"weighted_{name}"
        key = candidate = log_name(output, name)
        number = 0
        while candidate in self._taken:
            number += 1
            candidate = f"{key}_{number}"
        self._taken.add(candidate)
        return candidate
