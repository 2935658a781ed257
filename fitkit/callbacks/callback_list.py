"""The callbacks of a call: what its `callbacks` argument means, and how their hooks are called."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from fitkit.arguments import describe
from fitkit.callbacks.base import (
    HOOKS,
    SHORT_NAMES,
    Callback,
    LambdaCallback,
    Logs,
    from_all_ranks,
    overrides,
    run_of,
    several_ranks,
)
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.module import Module
from fitkit.outputs import EMPTY_MEAN
from fitkit.registry import Registry, subclass_of
from fitkit.shortcuts import Shortcut

Hook = Callable[..., Any]


UNUSED_LEFT_OUT = Shortcut("hooks that a callback doesn't override aren't called")


class CallbackList:
    """Calls the hooks of several callbacks, in list order.

    It keeps overridden hooks only. A loop asks `hooks("on_train_batch_end")` once and pays nothing
    for hooks that no callback overrides.

    Args:
        callbacks: a callback, a (nested) list of them, or None.

    Example:
        >>> from fitkit.callbacks import CallbackList, Timer
        >>> len(CallbackList([Timer(), [Timer()]]).callbacks)
        2
    """

    def __init__(self, callbacks: object = None) -> None:
        self.callbacks: list[Callback] = list(flatten(callbacks))
        self._hooks: dict[str, tuple[Hook, ...]] = {}

    @contextlib.contextmanager
    def running(self, model: Module, params: dict[str, Any]) -> Iterator[None]:
        """Surround a run, from before its first hook until after its last one.

        Every callback gets the model and the run's parameters. At the end, what the callbacks gave
        to `add_cleanup` is called.

        Args:
            model: the model that runs.
            params: a dict about the run; see `Callback.params`.

        Raises:
            ConfigurationError: another model's running `fit` has one of the callbacks, or the ranks
                have different ones.

        Ranks:
            Collective.
        """
        for callback in self.callbacks:
            _check_free(callback, model)
        if several_ranks(model):
            _check_alike(self.callbacks, model)
        contexts = model._fitkit.contexts
        outer = contexts.cleanups
        with contextlib.ExitStack() as cleanups, contextlib.ExitStack() as of_weights:
            cleanups.callback(contexts.put_cleanups, outer)
            contexts.put_cleanups((cleanups, of_weights))
            for callback in self.callbacks:
                if outer is not None and "params" in vars(callback):  # the outer run may call it
                    cleanups.callback(callback.set_params, callback.params)
                callback.set_model(model)
                callback.set_params(params)
            self._hooks = {name: tuple(self._collect(name)) for name in HOOKS}
            for callback in self.callbacks:
                self._hooks = callback.around_hooks(self._hooks)
            yield

    def _collect(self, name: str) -> Iterator[Hook]:
        names = [name, *(short for short, long in SHORT_NAMES.items() if long == name)]
        callbacks = self.callbacks
        if name == "on_train_end":
            callbacks = sorted(callbacks, key=lambda callback: not callback.swaps_weights)
        for callback in callbacks:
            for each in names:
                if overrides(callback, each) or not UNUSED_LEFT_OUT.is_on:
                    yield getattr(callback, each)

    def hooks(self, name: str) -> tuple[Hook, ...]:
        """Return the bound hooks of that name, from the callbacks that override it."""
        return self._hooks[name]

    def batches_between_hooks(self, steps_per_execution: int) -> int:
        """Return the number of training batches between two calls of the hooks."""
        return 1 if any(one.each_batch for one in self.callbacks) else steps_per_execution

    @contextlib.contextmanager
    def as_validated(self) -> Iterator[None]:
        """Give the model the weights that validations see, for the length of a block.

        Ranks:
            Collective.
        """
        with contextlib.ExitStack() as swapped:
            for callback in self.callbacks:
                swapped.enter_context(callback.as_validated())
            yield

    def call(self, name: str, *args: Any) -> None:
        """Call one hook on every callback that overrides it."""
        for hook in self._hooks[name]:
            hook(*args)

    def lost_losses(self, logs: Logs, names: Iterable[str] = ()) -> str | None:
        """Return which losses are NaN or infinite, in words; None if a callback handles them.

        Args:
            logs: the values.
            names: the names of losses beside `loss`.
        """
        losses = {name: logs.get(name, 0.0) for name in ("loss", *names)}
        lost = {n: x for n, x in losses.items() if x is not EMPTY_MEAN and not math.isfinite(x)}
        found = [f"{name} is {loss}" for name, loss in lost.items()]
        if not found or any(callback.watches_losses for callback in self.callbacks):
            return None
        return " and ".join(found)


def _check_alike(callbacks: list[Callback], model: Module) -> None:
    """Refuse ranks of a script with different callbacks of fitkit's: one rank would wait in an
    exchange of theirs for others that never come.

    Raises:
        ConfigurationError: on every rank, with what two ranks have.

    Ranks:
        Collective.
    """
    everyone = from_all_ranks(model, [type(one).__name__ for one in callbacks if _may_wait(one)])
    for rank, names in enumerate(everyone):
        if names != everyone[0]:
            first, others = (", ".join(some) or "none" for some in (everyone[0], names))
            raise ConfigurationError(
                f"The ranks have different callbacks: rank 0 has {first}, rank {rank} has {others}."
                " Give every rank the same ones: they write files on rank 0 alone.",
                code="FK043",
            )


def _may_wait(callback: Callback) -> bool:
    """Whether a callback is one of fitkit's that may wait for that of other ranks."""
    is_ours = type(callback).__module__.startswith("fitkit.")
    return is_ours and not (callback._acts_alone or isinstance(callback, LambdaCallback))


def _check_free(callback: Callback, model: Module) -> None:
    """Refuse a callback that another model's running `fit` has: it knows a single model.

    Raises:
        ConfigurationError: with what to write.
    """
    other = getattr(callback, "model", None)
    run = run_of(other) if other is not None and other is not model else None
    if run is not None and any(callback is own for own in run.callbacks):
        raise ConfigurationError(
            f"This {type(callback).__name__} belongs to another model's fit, which is running. "
            "Make one for each model, or copy it.",
            code="FK071",
        )


CALLBACKS: Registry[Callable[[], Callback]] = Registry(
    "callback",
    hint="A fitkit.callbacks.Callback or a list of them is accepted too.",
    group="fitkit.callbacks",
    page="docs/callbacks.md",
    accepts=subclass_of(Callback, CallbackList, or_maker=True),
    expected="a subclass of fitkit.callbacks.Callback, or a function that makes one",
)
"""Callbacks and loggers by name, and what makes each without arguments."""

Callbacks: TypeAlias = (
    Callback | CallbackList | str | Iterable[Callback | CallbackList | str | Iterable[Any]] | None
)
"""The `callbacks` argument: a callback, its name, or a list of them, which may contain lists."""


def flatten(callbacks: object) -> Iterator[Callback]:
    """Yield the callbacks in a callback, a name, a CallbackList, a nested list of them, or None.

    Raises:
        ArgumentTypeError: for anything else. For a class, the message says to add `()`.
        ConfigurationError: for an unknown name, or that of one which needs arguments.
    """
    if callbacks is None:
        return
    if isinstance(callbacks, str):
        yield _named(callbacks)
    elif isinstance(callbacks, CallbackList):
        yield from callbacks.callbacks
    elif isinstance(callbacks, Callback):
        yield callbacks
    elif isinstance(callbacks, type) and issubclass(callbacks, Callback):
        raise ArgumentTypeError(
            f"callbacks has the class {callbacks.__name__}, not a callback. "
            f"Write {callbacks.__name__}()."
        )
    elif isinstance(callbacks, Iterable) and not isinstance(callbacks, (bytes, dict)):
        for callback in callbacks:
            yield from flatten(callback)
    else:
        name = type(callbacks).__name__
        ours = f" Use fitkit.callbacks.{name}." if name in CALLBACKS else ""
        raise ArgumentTypeError(
            f"callbacks={describe(callbacks)} must be a fitkit.callbacks.Callback, the name of "
            f"one, or a list of them.{ours}"
        )


def _named(name: str) -> Callback:
    make = CALLBACKS[name]
    needed = [
        parameter.name
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        called = getattr(make, "__name__", name)
        raise ConfigurationError(
            f"callback={name!r} needs arguments. Write {called}({', '.join(needed)})."
        )
    made = make()
    if not isinstance(made, Callback):
        raise ArgumentTypeError(
            f"callback={name!r} gave {describe(made)}, not a fitkit.callbacks.Callback."
        )
    return made


def report_error(error: BaseException, hooks: Iterable[Hook]) -> None:
    """Call `on_exception` hooks; a failing one only warns, so the error and others come through."""
    for hook in hooks:
        try:
            hook(error)
        except Exception as another:
            warn(f"on_exception failed: {type(another).__name__}: {another}")
