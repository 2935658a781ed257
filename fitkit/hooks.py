"""The hooks of a model: what a subclass may do its own way. (Callbacks: `callbacks/base.py`.)

A subclass overrides one and keeps everything else. Whether it does is found out once a call, so
that a model without hooks of its own pays for none.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

from fitkit.callbacks.base import HOOKS, Callback
from fitkit.errors import ConfigurationError, warn
from fitkit.foreign_names import (
    callback_arguments,
    callback_hook,
    instead_of_callback_hook,
    instead_of_model_hook,
    model_hook,
)
from fitkit.module import Module

STAGES = ("training", "validation", "test", "predict")
"""What a step can be part of; `fit` has the first two. `evaluate` has the third, or
the second where a model has only that one, and `predict` the last."""

STEP_HOOKS = {
    stage: {
        hook: getattr(Module, hook)
        for hook in (f"{stage}_step", f"{stage}_step_end", f"{stage}_epoch_end")
        if hook != "predict_epoch_end"
    }
    for stage in STAGES
}
"""The hooks of each stage's steps, and what they are where nobody overrides them."""

_STEPS = {
    stage: (operator.attrgetter(*hooks), tuple(hooks.values()))
    for stage, hooks in STEP_HOOKS.items()
}
"""What reads the hooks of each stage from a class, all at once, and what it gives for `Module`."""

MODEL_HOOKS = (
    *(hook for hooks in STEP_HOOKS.values() for hook in hooks),
    "configure_optimizers",
    "transfer_batch_to_device",
)
"""What a subclass of `Model` may override."""

CLOSE = 0.87
"""How alike a name must be to a hook's for being a slip of the pen."""


def overridden(model: Module, hook: str) -> bool:
    """Whether a model has its own code for a hook: in its class, or set on the instance."""
    own = vars(model).get(hook) or getattr(type(model), hook)
    return own is not getattr(Module, hook)


def verb_of(model: Module, verb: str) -> Callable[..., Any]:
    """Return a verb, such as `fit`, as fitkit has it.

    A subclass of the user's may override it with other arguments, or to do more than that.
    """
    kinds = type(model).__mro__
    ours = next(k for k in kinds if verb in vars(k) and k.__module__.startswith("fitkit."))
    bound: Callable[..., Any] = vars(ours)[verb].__get__(model)
    return bound


def has_own_steps(model: Module, stage: str) -> bool:
    """Whether a stage isn't wholly what `compile` describes."""
    read, plain = _STEPS[stage]
    if read(type(model)) != plain:
        return True
    return not model.__dict__.keys().isdisjoint(STEP_HOOKS[stage]) and any(
        overridden(model, hook) for hook in STEP_HOOKS[stage]
    )


def evaluation_stage(model: Module) -> str | None:
    """Whose steps `evaluate` calls: the test's, else the validation's; None where it has none."""
    if has_own_steps(model, "test"):
        return "test"
    return "validation" if has_own_steps(model, "validation") else None


def check_steps(model: Module) -> None:
    """Warn of names that look like hooks, once a class; refuse steps of impossible arguments.

    Raises:
        ConfigurationError: a step that takes no batch.
    """
    _check_class(type(model))  # type: ignore[arg-type]
    for stage in STAGES:
        if overridden(model, f"{stage}_step"):
            step_arguments(model, f"{stage}_step")


@functools.cache
def _check_class(kind: type) -> None:
    names = {
        name: base
        for base in _own_bases(kind)
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("_")
    }
    for name, base in names.items():
        if name in vars(Module):
            continue
        meant = _meant(name)
        if meant is not None and meant in vars(base):
            continue  # it serves two libraries, or calls the method itself
        advice = instead_of_model_hook(name) or (f"Did you mean {meant}?" if meant else None)
        if advice is not None:
            warn(f"{kind.__name__}.{name} is never called by fitkit. {advice}", code="FK026")


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Warn of callbacks' methods that look like hooks, once a class; refuse hooks of others'.

    Raises:
        ConfigurationError: a hook that takes other arguments than fitkit gives it.
    """
    for callback in callbacks:
        if not type(callback).__module__.startswith("fitkit."):
            _check_callback(type(callback))  # type: ignore[arg-type]


@functools.cache
def _check_callback(kind: type) -> None:
    for name in dir(kind):
        if not callable(getattr(kind, name)):
            continue
        if name in HOOKS:
            _check_arguments(kind, name)
            continue
        if (advice := instead_of_callback_hook(name)) is not None:
            # A callback may have a setup of its own, which it calls itself.
            if name.startswith("on_") or _lightnings_arguments(getattr(kind, name)):
                warn(f"{kind.__name__}.{name} is never called by fitkit. {advice}", code="FK026")
            continue
        if not name.startswith("on_"):
            continue
        advice = instead_of_model_hook(name)
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=CLOSE)
        meant = callback_hook(name) or (close[0] if close and advice is None else None)
        if meant is not None and getattr(kind, meant) is not getattr(Callback, meant):
            continue  # it serves two libraries, or calls the method itself
        if meant is not None:
            arguments = ", ".join(inspect.signature(getattr(Callback, meant)).parameters)
            advice = f"Write def {meant}({arguments})."
        if advice is not None:
            warn(f"{kind.__name__}.{name} is never called by fitkit. {advice}", code="FK026")


def _check_arguments(kind: type, name: str) -> None:
    """Refuse a callback's hook that can't be called as fitkit does."""
    own, base = inspect.getattr_static(kind, name), getattr(Callback, name)
    if own is base or not inspect.isfunction(own):
        return
    wanted = list(inspect.signature(base).parameters)
    signature = inspect.signature(own)
    theirs = _lightnings_arguments(own)
    try:
        signature.bind(*wanted)
        if not theirs:
            return
    except TypeError:
        pass
    where = "".join(f" {callback_arguments()[argument]}." for argument in theirs)
    raise ConfigurationError(
        f"{kind.__name__}.{name} takes {signature}, but fitkit calls it as "
        f"{name}({', '.join(wanted[1:])}). Write def {name}({', '.join(wanted)}).{where}"
    )


def _lightnings_arguments(function: object) -> list[str]:
    """Return the arguments of a function that only Lightning gives."""
    if not inspect.isfunction(function):
        return []
    theirs = callback_arguments()
    return [name for name in inspect.signature(function).parameters if name in theirs]


def _own_bases(kind: type) -> list[type]:
    return [
        base
        for base in kind.__mro__
        if issubclass(base, Module) and not base.__module__.startswith("fitkit.")
    ]


def _meant(name: str) -> str | None:
    """Return the hook that a name looks like; None where it looks like none."""
    close = difflib.get_close_matches(name, MODEL_HOOKS, n=1, cutoff=CLOSE)
    return model_hook(name) or (close[0] if close else None)


def step_arguments(model: Module, step: str) -> tuple[str, ...]:
    """Return what a step takes beside the batch: `"batch_idx"`, `"optimizer_idx"`, in its order.

    Raises:
        ConfigurationError: it takes no batch, or needs something that there isn't.
    """
    parameters = list(inspect.signature(getattr(model, step)).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [item for item in parameters if item.kind in kinds]
    if any(item.kind is inspect.Parameter.VAR_POSITIONAL for item in parameters):
        return ("batch_idx",) if len(named) < 2 else _known(model, step, named[1:])
    if not named:
        raise ConfigurationError(
            f"{type(model).__name__}.{step} takes no batch. Write def {step}(self, batch, "
            "batch_idx)."
        )
    return _known(model, step, named[1:])


def _known(model: Module, step: str, named: list[inspect.Parameter]) -> tuple[str, ...]:
    found = []
    for position, item in enumerate(named):
        if item.name == "optimizer_idx":
            found.append("optimizer_idx")
        elif position == 0:
            found.append("batch_idx")
        elif item.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"{type(model).__name__}.{step} needs {item.name!r}, which fitkit doesn't have. "
                f"Write def {step}(self, batch, batch_idx)."
            )
        else:
            break
    return tuple(found)
