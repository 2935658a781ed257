"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fitkit.arguments import describe
from fitkit.callbacks.base import HOOKS, Callback
from fitkit.errors import ArgumentTypeError
from fitkit.registry import nearest


class LambdaCallback(Callback):
    """Calls the functions that it was given, each at the hook of its name.

    Args:
        **hooks: functions by the hook's name, with that hook's arguments.

    Raises:
        ArgumentTypeError: a name that is no hook, or a value that can't be called.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> told = fitkit.callbacks.LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: print(epoch, sorted(logs))
        ... )
        >>> x, y = torch.ones(32, 2), torch.ones(32, 1)
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=told)
        0 ['loss']
        1 ['loss']
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                close = nearest(name, HOOKS)
                suggestion = f" Did you mean {' or '.join(close)}?" if close else ""
                raise ArgumentTypeError(
                    f"LambdaCallback() has no hook {name!r}.{suggestion} Hooks: {', '.join(HOOKS)}."
                )
            if function is None:
                continue
            if not callable(function):
                raise ArgumentTypeError(f"{name}={describe(function)} must be callable.")
            setattr(self, name, function)
