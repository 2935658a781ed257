"""What things of the user's are called in logs: functions, objects, classes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(class_name: str) -> str:
    """`BCEWithLogitsLoss` as `bce_with_logits_loss`, `MeanIoU` as `mean_iou`."""
    return _WORD_STARTS.sub("_", class_name.replace("IoU", "Iou")).lower()


def callable_name(function: Callable[..., Any]) -> str:
    """A function's name, the name inside a partial, or an object's class in snake case."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return snake_case(type(function).__name__)
    return "lambda" if name == "<lambda>" else name
