"""The base class of callbacks, with its hooks, and what callbacks ask of a run and its ranks."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.fit_state import Run
from fitkit.module import Module
from fitkit.printing import say
from fitkit.registry import did_you_mean

Logs = Mapping[str, Any]


def run_of(model: Module) -> Run | None:
    """Return the running `fit`, or None."""
    return model._fitkit.fit_state.run


MODELS = ("model", "_model", "_remembered")
"""The attributes that hold a callback's model: each run sets it, so copies don't have it."""

Value = TypeVar("Value")


class WeakModel:
    """A callback's `model` that doesn't keep the model alive. It is None once the model is gone.

    Use it for callbacks in a reference cycle. Otherwise the model, and all of its memory, would
    stay until the garbage collector runs.
    """

    def __get__(self, callback: Any, kind: type | None = None) -> Any:
        found = None if callback is None else vars(callback).get("_model")
        return None if found is None else found()

    def __set__(self, callback: Any, model: Any) -> None:
        vars(callback)["_model"] = weakref.ref(model)


class Callback:
    """Base class of callbacks: override the hooks of `fit`, `evaluate` and `predict` you need.

    `fit` calls the hooks in this order:

    1. `on_train_begin`
    2. in each epoch: `on_epoch_begin`; for each batch `on_train_batch_begin` and
       `on_train_batch_end`; for a validation `on_test_begin`, `on_test_batch_begin` and
       `on_test_batch_end` for each batch, and `on_test_end`; then `on_epoch_end`
    3. `on_train_end`

    A validation within an epoch (`validation_freq=0.2`) calls the test hooks, too, and then
    `on_validation_within_epoch`. `evaluate` calls the test hooks, `predict` the predict hooks.
    Epochs and batches count from 0. Hooks that you don't override cost nothing.

    `logs` holds the numbers so far. In batch hooks they are running means over the epoch's samples;
    the device is read only when you read them. At the end of an epoch they are the values of the
    training and of the validation (`val_…`). All callbacks share the dict of the epoch's logs in
    list order. Later callbacks and the history see what you add.

    Whatever a hook changes in the model, it gives to `add_cleanup` or `enter_context`. The run then
    undoes it at its end, also after an error or Ctrl-C, which never reach `on_train_end`.

    Ranks:
        Every rank calls the hooks of its own copy of a callback. The object that you passed is
        rank 0's. Change weights or rates on every rank. Print and write files only if
        `self.model.is_global_zero`. `fit` makes the same number of training steps on each rank,
        and the epoch's logs are the same on all. So hooks of training batches and of epochs may
        make collective calls. Hooks of test and predict batches may not.

    Attributes:
        model: the Model that runs.
        params: a dict about the run: `stage` (`"fit"`, `"evaluate"`, `"predict"`), `epochs`,
            `initial_epoch`, `steps` (batches per epoch; None if unknown), `validation` (whether
            there is one), `validation_freq`, `validation_steps`, `samples`, `batch_size`,
            `verbose`. With several validation sets also their names, `validation_sets`, and that
            of the running validation, `validation_set`. All callbacks of a run share this dict.
        stops_alike: whether this callback, if it sets `model.stop_training` at a batch, does so at
            the same batch on every rank (or never does). If a callback with batch hooks doesn't
            set this to True, the ranks ask each other after every step.
        each_batch: whether the hooks of training batches must be called for every batch. Default
            False: with `compile(steps_per_execution=k)` they are called once for k batches, with
            the number of the group's first or last one. If one callback of a fit needs each batch,
            the hooks of all callbacks are called for each. The steps then run one by one, which
            changes no number. Set it if you count, average or compare batches or updates.
        comes_last: whether the hooks are called after those of all other callbacks, including
            fitkit's own. Callbacks that save need this to see the others' changes.
        swaps_weights: whether this callback gives the model other weights: for validations, as
            `as_validated` says, or when fit ends. Its `on_train_end` and its clean-ups are called
            before the others', so that best weights that another callback restores stay. Default
            False.
        watches_losses: whether this callback handles losses that are NaN or infinite. The run then
            omits its own warning about them.

    Example:
        >>> import torch, fitkit
        >>> class Printer(fitkit.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print("epoch", epoch, sorted(logs))
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> history = model.fit(torch.ones(8, 4), torch.ones(8), verbose=0, callbacks=[Printer()])
        epoch 0 ['loss']
    """

    model: Module
    params: dict[str, Any]
    stops_alike: bool = False
    each_batch: bool = False
    comes_last: bool = False
    swaps_weights: bool = False
    watches_losses: bool = False
    _acts_alone: bool = False  # some ranks may lack it: it exchanges nothing

    def set_model(self, model: Module) -> None:
        """Take the model, before the first hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the run's parameters, before the first hook."""
        self.params = params

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but the model, which each run sets."""
        return {name: value for name, value in vars(self).items() if name not in MODELS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A hook that is the original's own method (`self.on_epoch_end = self._after`).
        for name, value in state.items():
            original = getattr(value, "__self__", None) if name in HOOKS else None
            if type(original) is type(self) and vars(original).get(name) == value:
                value = value.__func__.__get__(self)
            vars(self)[name] = value

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        """Return what other ranks get of this callback."""
        return self.__getstate__()

    def add_cleanup(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have the run call `function(*args, **kwargs)` at its end, whatever ends it.

        The run is the `fit`, `evaluate` or `predict` whose hooks are called now. It calls what all
        callbacks have added after its last hook, in reverse order. If one of the functions fails,
        the others are called all the same. After an error of the run, a failure only warns.

        Call it before the change that the function undoes. Then nothing can come between them.

        Raises:
            ConfigurationError: no run calls this callback now.

        Ranks:
            The function must make no collective calls: other ranks may have failed or gone.

        Example:
            >>> import torch, fitkit
            >>> class Counts(fitkit.callbacks.Callback):
            ...     def on_train_begin(self, logs=None):
            ...         self.calls = 0
            ...         handle = self.model.net.register_forward_hook(self.count)
            ...         self.add_cleanup(handle.remove)
            ...     def count(self, module, inputs, output):
            ...         self.calls += 1
            >>> model = fitkit.Model(torch.nn.Linear(4, 1))
            >>> model.compile("adam", "mse")
            >>> counts = Counts()
            >>> history = model.fit(torch.ones(64, 4), torch.ones(64), verbose=0, callbacks=counts)
            >>> counts.calls, len(model.net._forward_hooks)
            (2, 0)
        """
        model = getattr(self, "model", None)
        cleanups = None if model is None else model._fitkit.contexts.cleanups
        if cleanups is None:
            raise ConfigurationError(
                f"{type(self).__name__} asked for a clean-up outside of fit, evaluate and predict, "
                "so nobody would call it. In a loop of your own, call the hooks within `with "
                "CallbackList(callbacks).running(model, params):`."
            )

        def clean(kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
            try:
                function(*args, **kwargs)
            except Exception as another:
                if error is None:
                    raise
                name = type(self).__name__
                warn(f"A clean-up of {name} failed: {type(another).__name__}: {another}")

        cleanups[self.swaps_weights].push(clean)

    def enter_context(self, context: AbstractContextManager[Value]) -> Value:
        """Enter a `with` block that lasts until the run's end, whatever ends it.

        Its exit is a clean-up as of `add_cleanup`. It doesn't see the run's error.

        Returns:
            What `with context as value` gives.

        Raises:
            ConfigurationError: no run calls this callback now.

        Example:
            >>> import tempfile, fitkit
            >>> class Scratch(fitkit.callbacks.Callback):
            ...     def on_train_begin(self, logs=None):
            ...         self.folder = self.enter_context(tempfile.TemporaryDirectory())
        """
        block = contextlib.ExitStack()
        self.add_cleanup(block.close)
        return block.enter_context(context)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback: plain data and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `on_train_begin`, which resets."""

    def around_hooks(self, hooks: dict[str, tuple[Callable[..., Any], ...]]) -> Any:
        """Return the hooks that the run will call, by name and in order. Default: as given.

        Override it in a callback that watches the others. Called once before a run's first hook.
        """
        return hooks

    def as_validated(self) -> AbstractContextManager[Any]:
        """Give the model the weights that validations see, for the length of a block.

        Override it together with `swaps_weights` if they aren't those that train. What is saved or
        kept because of a validation's value is collected in such a block.

        Ranks:
            Collective.
        """
        return contextlib.nullcontext()

    def prepare_optimizers(self, model: Module) -> None:
        """Set up the parameter groups that the callback needs, before a resumed fit loads.

        A stored optimizer state fits only an optimizer with the same groups.
        """

    # fit
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Act when `fit` begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Act when `fit` ends. `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Act when an epoch begins. The modules are already in training mode, except those that
        were in evaluation mode when `fit` began."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Act when an epoch has ended, after its validation."""

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        """Act after a validation within an epoch, at training batch `batch` (`validation_freq`).

        `logs` holds the validation's values only (`val_…`), the same on all ranks. After the
        validation at the end of an epoch, `on_epoch_end` is called instead.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a training batch."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Act after a training batch."""

    def on_exception(self, error: BaseException) -> None:
        """Act if `fit` ends with an exception, including Ctrl-C and `sys.exit`.

        `on_train_end` isn't called then. Make no collective calls here: other ranks may have failed
        or gone.
        """

    # evaluate, and the validation in fit
    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Act when `evaluate` or a validation begins."""

    def on_test_end(self, logs: Logs) -> None:
        """Act when `evaluate` or a validation has ended. `logs` are its values, no prefix."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a batch of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Act after a batch of an evaluation."""

    # predict
    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Act when `predict` begins."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Act when `predict` has ended."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a batch of `predict`."""

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        """Act after a batch of `predict`. `logs["outputs"]` holds the net's outputs."""

    # Keras's short names for the training's batch hooks
    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Another name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Logs) -> None:
        """Another name of `on_train_batch_end`."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The names of all hooks."""

SHORT_NAMES = {
    "on_batch_begin": "on_train_batch_begin",
    "on_batch_end": "on_train_batch_end",
}
"""Hooks with a second name, and the hook that each name stands for."""


def overrides(callback: Callback, hook: str) -> bool:
    """Whether `callback` has its own code for `hook` (in its class or on the instance)."""
    if hook in vars(callback):
        return True
    return getattr(type(callback), hook) is not getattr(Callback, hook)


class LambdaCallback(Callback):
    """Calls the functions that you give it, each at the hook of its name.

    Args:
        **hooks: functions by hook name. Each takes that hook's arguments.

    Raises:
        ArgumentTypeError: a name isn't a hook, or a value isn't callable.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> prints = fitkit.callbacks.LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: print(epoch, sorted(logs))
        ... )
        >>> x, y = torch.ones(32, 2), torch.ones(32, 1)
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=prints)
        0 ['loss']
        1 ['loss']
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise ArgumentTypeError(
                    f"LambdaCallback() has no hook {name!r}.{did_you_mean(name, HOOKS)} Hooks: "
                    f"{', '.join(HOOKS)}."
                )
            if function is None:
                continue
            if not callable(function):
                raise ArgumentTypeError(f"{name}={describe(function)} must be callable.")
            setattr(self, name, function)


def batches_of_call(callback: Callback, batch: int) -> range:
    """Return the numbers of the batches that a call of `on_train_batch_end` is for; the last is
    `batch`.

    There are several with `steps_per_execution`, and fewer at the end of an epoch.
    """
    size = callback.params.get("steps_per_execution", 1)
    return range(batch - batch % size, batch + 1)


def is_multiple_in(batches: range, every: int) -> bool:
    """Whether one of these batches (from 0) is an `every`-th one."""
    return batches.stop // every > batches.start // every


def from_rank_zero(model: Module, value: Value) -> Value:
    """Rank 0's value, so that every rank makes the same decision.

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
    """Make the ranks' modules equal: weights that they hold separately, and buffers. Buffers are
    taken from rank 0, because running statistics differ between ranks that see other data.

    Ranks:
        Collective.
    """
    strategy = model._fitkit.compilation.strategy
    if strategy.engine is not None:
        strategy.engine.average_ranks()
    if strategy.collectives.world_size > 1:
        model._fitkit.compilation.trained(model).share_buffers(strategy)


def print_on_rank_zero(model: Module, text: str) -> None:
    """Print a line on rank 0 only."""
    if model.is_global_zero:
        say(text)


def several_ranks(model: Module) -> bool:
    """Whether there are other ranks."""
    size: int = model._fitkit.compilation.strategy.collectives.world_size
    return size > 1


PERIOD_S = 0.05
"""About how long a flag may wait until the ranks compare theirs, in seconds."""
MOST_STEPS = 100
"""The most steps between two exchanges, even if the steps are short: they may become longer."""


class AnyRankFlag:
    """Tells all ranks at the same step that one of them has set a flag, by a signal or a clock.

    An exchange after every step would cost too much. So several steps pass between two exchanges:
    as many as rank 0 makes in a twentieth of a second.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a fit."""
        self._pause = self._left = 1
        self._asked_at = time.monotonic()

    def after_step(self, model: Module, flag: bool) -> bool:
        """Whether any rank's flag was set at an exchange. False in between.

        Ranks:
            Collective: after each step on each rank.
        """
        if not several_ranks(model):
            return flag
        self._left -= 1
        if self._left:
            return False
        answers = from_all_ranks(model, (flag, self._next_pause()))
        self._pause = self._left = answers[0][1]
        return any(flagged for flagged, _ in answers)

    def _next_pause(self) -> int:
        """Return the number of steps until the next exchange."""
        now = time.monotonic()
        step_s = max(now - self._asked_at, 1e-9) / self._pause
        self._asked_at = now
        return max(1, min(int(PERIOD_S / step_s), 2 * self._pause, MOST_STEPS))
