"""The callbacks of one run, with each hook's list made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fitkit.arguments import describe
from fitkit.callbacks.base import HOOKS, SHORT_NAMES, Callback, overrides
from fitkit.errors import ArgumentTypeError
from fitkit.module import Module

Hook = Callable[..., Any]


class CallbackList:
    """Calls hooks on several callbacks, in list order.

    Only overridden hooks are kept, so a loop asks `hooks("on_train_batch_end")` once and
    pays nothing for what nobody listens to.

    Args:
        callbacks: a callback, a (nested) list of them, or None.
    """

    def __init__(self, callbacks: object = None) -> None:
        self.callbacks = list(flatten(callbacks))
        self._hooks: dict[str, tuple[Hook, ...]] = {}

    def begin(self, model: Module, params: dict[str, Any]) -> None:
        """Tell every callback its model and the run's parameters."""
        for callback in self.callbacks:
            callback.set_model(model)
            callback.set_params(params)
        self._hooks = {name: tuple(self._collect(name)) for name in HOOKS}
        for callback in self.callbacks:
            self._hooks = callback.around_hooks(self._hooks)

    def _collect(self, name: str) -> Iterator[Hook]:
        names = [name, *(short for short, long in SHORT_NAMES.items() if long == name)]
        for callback in self.callbacks:
            for each in names:
                if overrides(callback, each):
                    yield getattr(callback, each)

    def hooks(self, name: str) -> tuple[Hook, ...]:
        """The bound hooks of that name which somebody overrides."""
        return self._hooks[name]

    def call(self, name: str, *args: Any) -> None:
        """Call one hook on every callback that overrides it."""
        for hook in self._hooks[name]:
            hook(*args)


def flatten(callbacks: object) -> Iterator[Callback]:
    """The callbacks in a callback, a CallbackList, a nested list of them, or None.

    Raises:
        ArgumentTypeError: for anything else; a class gets told to add `()`.
    """
    if callbacks is None:
        return
    if isinstance(callbacks, CallbackList):
        yield from callbacks.callbacks
    elif isinstance(callbacks, Callback):
        yield callbacks
    elif isinstance(callbacks, type) and issubclass(callbacks, Callback):
        raise ArgumentTypeError(
            f"callbacks has the class {callbacks.__name__}, not a callback. "
            f"Write {callbacks.__name__}()."
        )
    elif isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, bytes, dict)):
        for callback in callbacks:
            yield from flatten(callback)
    else:
        raise ArgumentTypeError(
            f"callbacks={describe(callbacks)} must be a fitkit.callbacks.Callback or a list "
            "of them."
        )
