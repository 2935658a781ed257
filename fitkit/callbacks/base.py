"""The moments of a run, the base class for whoever acts at them, and the list that a run calls."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError
from fitkit.module import Module
from fitkit.registry import nearest

Logs = Mapping[str, Any]


class Run(Protocol):
    """The `fit` that runs, as far as callbacks use it.

    Attributes:
        steps_done: the steps made in this epoch.
        is_between_groups: whether no batch waits for others to make an update with it, so that a
            save is whole.
        resumed: where the training goes on (`epoch`, `steps`); None where it begins anew.
        batch: of the last step on this rank, as the source gave it; None between epochs.
        seen_values: the values of the epoch's last validation, where callbacks have seen them
            within the epoch already (`on_validation_within_epoch`); else empty.
    """

    steps_done: int
    batch: Any
    seen_values: dict[str, Any]

    @property
    def is_between_groups(self) -> bool: ...

    @property
    def resumed(self) -> Any: ...

    def weights(self, *, spread: bool = False, trainable_only: bool = False) -> dict[str, Any]:
        """Collect the weights for a checkpoint, on all ranks; `spread`: each rank its part."""

    def contents(
        self, *, spread: bool = False, trainable_only: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Collect the weights and all else for a checkpoint, as `weights` does."""


def run_of(model: Module) -> Run | None:
    """The `fit` that runs; None outside one."""
    run: Run | None = model._fitkit.fit_state.run
    return run


MODELS = ("model", "_model")
"""Where a callback has its model."""


class WeakModel:
    """A callback's `model` that doesn't keep the model alive; None where it has gone.

    For callbacks in a cycle of references, in which a model would wait for the garbage collector
    with all of its memory.
    """

    def __get__(self, callback: Any, kind: type | None = None) -> Any:
        found = None if callback is None else vars(callback).get("_model")
        return None if found is None else found()

    def __set__(self, callback: Any, model: Any) -> None:
        vars(callback)["_model"] = weakref.ref(model)


class Callback:
    """Acts at moments of `fit`, `evaluate` and `predict`: override the hooks you need.

    Hooks are called in this order. In `fit`: `on_train_begin`, then for each epoch
    `on_epoch_begin`, `on_train_batch_begin` and `on_train_batch_end` for each batch, where
    there is a validation `on_test_begin`, `on_test_batch_begin` and `on_test_batch_end` for
    each of its batches, `on_test_end`, then `on_epoch_end`; at last `on_train_end`.
    A validation within an epoch (`validation_freq=0.2`) has the test hooks, too, and then
    `on_validation_within_epoch`.
    `evaluate` calls the test hooks, `predict` the predict hooks. Epochs and batches count
    from 0. A callback pays only for the hooks that it overrides.

    `logs` has the numbers so far: in batch hooks the running means over the epoch's samples
    (a mapping that reads the device only when you read it), at an epoch's end the
    training's and the validation's (`val_…`) values. The epoch's logs are one dict, shared
    by all callbacks in list order: what you add, later callbacks and the history see.

    Ranks:
        Every rank calls the hooks of its own copy of a callback; the object that you passed is
        rank 0's. So what changes weights or rates does it everywhere, and what prints or writes
        files asks `self.model.is_global_zero`. `fit` makes as many training steps on each rank,
        and the epoch's logs are the same on all: hooks of training batches and of epochs may
        be collective, those of test and predict batches not.

    Attributes:
        model: the Model that runs.
        params: what is known of the run: `stage` (`"fit"`, `"evaluate"`, `"predict"`),
            `epochs`, `initial_epoch`, `steps` (batches an epoch; None where unknown),
            `validation` (whether there is any), `validation_freq`, `validation_steps`, `samples`,
            `batch_size`, `verbose`. All callbacks of a run share this dict.
        stops_alike: whether this callback, where it sets `model.stop_training` at a batch, does
            so at the same batch on every rank (or never does). Where one that acts at batches
            doesn't say so, the ranks ask each other after every step.
        comes_last: whether the hooks are called after those of all other callbacks, fitkit's own
            too: what saves has to see what they have done.
        watches_losses: whether this callback acts on losses that are NaN or infinite; a run then
            leaves out its own warning about them.

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
    comes_last: bool = False
    watches_losses: bool = False

    def set_model(self, model: Module) -> None:
        """Called once before the first hook with the model that runs."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Called once before the first hook with what is known of the run."""
        self.params = params

    def __getstate__(self) -> dict[str, Any]:
        """Send other ranks all but the model, which is there already."""
        return {name: value for name, value in vars(self).items() if name not in MODELS}

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint keeps of this callback: plain data and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave; called after `on_train_begin`, which begins anew."""

    def around_hooks(self, hooks: dict[str, tuple[Callable[..., Any], ...]]) -> Any:
        """The hooks that a run will call, by name and in order; here as they are given.

        For a callback that watches the others; called once before a run's first hook.
        """
        return hooks

    def prepare_optimizers(self, model: Module) -> None:
        """Arrange parameter groups as the callback's runs have them, before a resumed fit loads.

        A stored optimizer's state fits an optimizer of the same groups only.
        """

    # fit
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """`fit` begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """`fit` ends; `logs` are the last epoch's."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch begins; the modules are in training mode already, but for what was in evaluation
        mode when `fit` began."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch ended, its validation included."""

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        """A validation within an epoch ended, after training batch `batch` (`validation_freq`).

        `logs` are its values alone (`val_…`), the same on all ranks. After the validation at an
        epoch's end comes `on_epoch_end`.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A training batch begins."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """A training batch ended."""

    def on_exception(self, error: BaseException) -> None:
        """`fit` ends by an exception, also by Ctrl-C or `sys.exit`; `on_train_end` isn't called.

        Other ranks may have failed or gone: nothing here may be collective.
        """

    # evaluate, and the validation in fit
    def on_test_begin(self, logs: Logs | None = None) -> None:
        """`evaluate` or a validation begins."""

    def on_test_end(self, logs: Logs) -> None:
        """`evaluate` or a validation ended; `logs` are its values, without prefix."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch of an evaluation begins."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """A batch of an evaluation ended."""

    # predict
    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """`predict` begins."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """`predict` ended."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch of `predict` begins."""

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        """A batch of `predict` ended; `logs["outputs"]` is what the net gave."""

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
"""Hooks with a second name, and the hook that each stands for."""


def overrides(callback: Callback, hook: str) -> bool:
    """Whether `callback` has its own code for `hook` (in its class or on the instance)."""
    if hook in vars(callback):
        return True
    return getattr(type(callback), hook) is not getattr(Callback, hook)


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


Hook = Callable[..., Any]


class CallbackList:
    """Calls hooks on several callbacks, in list order.

    Only overridden hooks are kept, so a loop asks `hooks("on_train_batch_end")` once and
    pays nothing for what nobody listens to.

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

    def warning_of(self, logs: Logs) -> str | None:
        """The warning about losses that are NaN or infinite; None where a callback watches them."""
        losses = {name: logs.get(name, 0.0) for name in ("loss", "val_loss")}
        found = [f"{name} is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if not found or any(callback.watches_losses for callback in self.callbacks):
            return None
        return (
            f"{' and '.join(found)}. fit(…, callbacks=fitkit.callbacks.DetectNonFinite()) names "
            "the first module in training whose output or gradient is NaN or infinite."
        )


Callbacks: TypeAlias = (
    Callback | CallbackList | Iterable[Callback | CallbackList | Iterable[Any]] | None
)
"""What the verbs take: a callback, or a list of them, in which there may be lists."""


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
