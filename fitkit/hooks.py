"""The hooks of a model: what a subclass may do its own way.

A subclass overrides one and keeps everything else. Whether it does is found out once a call, so
that a model without hooks of its own pays for none.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable

from fitkit.callbacks.base import HOOKS, Callback
from fitkit.errors import ConfigurationError, warn
from fitkit.module import Module

STAGES = ("training", "validation", "test", "predict")
"""What a step can be part of; `fit` has the first two, `evaluate` and `predict` the others."""

MODEL_HOOKS = (
    *(f"{stage}_step" for stage in STAGES),
    *(f"{stage}_step_end" for stage in STAGES),
    *(f"{stage}_epoch_end" for stage in STAGES[:3]),
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


def has_own_steps(model: Module, stage: str) -> bool:
    """Whether a stage isn't wholly what `compile` describes."""
    hooks = [f"{stage}_step", f"{stage}_step_end"]
    hooks += [] if stage == "predict" else [f"{stage}_epoch_end"]
    return any(overridden(model, hook) for hook in hooks)


def evaluation_stage(model: Module) -> str | None:
    """Whose steps `evaluate` calls: the test's, else the validation's; None where it has none."""
    return next((stage for stage in ("test", "validation") if has_own_steps(model, stage)), None)


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
        if meant is not None and meant not in vars(base):
            warn(f"{kind.__name__}.{name} is never called by fitkit. Did you mean {meant}?")
        elif name in INSTEAD:
            warn(f"{kind.__name__}.{name} is never called by fitkit. {INSTEAD[name]}")


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Warn of callbacks' methods that look like hooks, once a class."""
    for callback in callbacks:
        _check_callback(type(callback))  # type: ignore[arg-type]


@functools.cache
def _check_callback(kind: type) -> None:
    for name in dir(kind):
        if name in HOOKS or not name.startswith("on_") or not callable(getattr(kind, name)):
            continue
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=CLOSE)
        meant = CALLBACK_HOOKS.get(name) or (close[0] if close and name not in INSTEAD else None)
        if meant is not None and getattr(kind, meant) is not getattr(Callback, meant):
            continue  # it serves two libraries, or calls the method itself
        advice = INSTEAD.get(name)
        if meant is not None:
            arguments = ", ".join(inspect.signature(getattr(Callback, meant)).parameters)
            advice = f"Write def {meant}({arguments})."
        if advice is not None:
            warn(f"{kind.__name__}.{name} is never called by fitkit. {advice}")


def _own_bases(kind: type) -> list[type]:
    return [
        base
        for base in kind.__mro__
        if issubclass(base, Module) and not base.__module__.startswith("fitkit.")
    ]


def _meant(name: str) -> str | None:
    """The hook that a name looks like; None where it looks like none."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    close = difflib.get_close_matches(name, MODEL_HOOKS, n=1, cutoff=CLOSE)
    return close[0] if close else None


OTHER_NAMES = {
    "train_step": "training_step",
    "val_step": "validation_step",
    "eval_step": "validation_step",
    "evaluation_step": "validation_step",
    "train_step_end": "training_step_end",
    "val_step_end": "validation_step_end",
    "train_epoch_end": "training_epoch_end",
    "val_epoch_end": "validation_epoch_end",
    "configure_optimiser": "configure_optimizers",
    "configure_optimisers": "configure_optimizers",
    "batch_to_device": "transfer_batch_to_device",
    "prediction_step": "predict_step",
}
"""What people call our hooks, beyond slips of the pen."""

CALLBACK_HOOKS = {
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_train_start": "on_train_begin",
    "on_train_end": "on_train_end",
    "on_epoch_start": "on_epoch_begin",
    "on_epoch_end": "on_epoch_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_start": "on_train_batch_begin",
    "on_train_batch_end": "on_train_batch_end",
    "on_validation_start": "on_test_begin",
    "on_validation_end": "on_test_end",
    "on_validation_epoch_start": "on_test_begin",
    "on_validation_epoch_end": "on_test_end",
    "on_validation_batch_start": "on_test_batch_begin",
    "on_validation_batch_end": "on_test_batch_end",
    "on_test_start": "on_test_begin",
    "on_test_end": "on_test_end",
    "on_test_epoch_start": "on_test_begin",
    "on_test_epoch_end": "on_test_end",
    "on_test_batch_start": "on_test_batch_begin",
    "on_test_batch_end": "on_test_batch_end",
    "on_predict_start": "on_predict_begin",
    "on_predict_end": "on_predict_end",
    "on_predict_epoch_start": "on_predict_begin",
    "on_predict_epoch_end": "on_predict_end",
    "on_predict_batch_start": "on_predict_batch_begin",
    "on_predict_batch_end": "on_predict_batch_end",
}
"""Lightning's hooks for which fitkit's callbacks have one, and its name."""

_LOADER = "Give the data to {}."
_MANUAL = "Set automatic_optimization = False and do it in training_step."
INSTEAD = {
    **{
        theirs: f"Write a callback with {ours} and give it to fit."
        for theirs, ours in CALLBACK_HOOKS.items()
    },
    "on_train_epoch_end": "Override training_epoch_end, or write a callback with on_epoch_end.",
    "on_validation_epoch_end": "Override validation_epoch_end.",
    "on_test_epoch_end": "Override test_epoch_end.",
    "train_dataloader": _LOADER.format("fit(loader)"),
    "val_dataloader": _LOADER.format("fit(…, validation_data=loader)"),
    "test_dataloader": _LOADER.format("evaluate(loader)"),
    "predict_dataloader": _LOADER.format("predict(loader)"),
    "predict_epoch_end": "Use what predict returns.",
    "prepare_data": "Call it before fit.",
    "on_before_backward": _MANUAL,
    "on_after_backward": _MANUAL,
    "on_before_optimizer_step": _MANUAL,
    "on_before_zero_grad": _MANUAL,
    "lr_scheduler_step": "Return the scheduler from configure_optimizers with its interval.",
    "on_before_batch_transfer": "Override transfer_batch_to_device.",
    "on_after_batch_transfer": "Override transfer_batch_to_device.",
    "on_save_checkpoint": "Give a callback a state_dict.",
    "on_load_checkpoint": "Give a callback a load_state_dict.",
    "configure_sharded_model": "Build the layers in __init__.",
    "tbptt_split_batch": "Give fit shorter sequences.",
    "get_progress_bar_dict": "Write self.log(…, prog_bar=True).",
    "optimizer_step": "Set automatic_optimization = False and step in training_step.",
    "optimizer_zero_grad": "Set automatic_optimization = False and step in training_step.",
    "configure_gradient_clipping": "Write compile(gradient_clip_val=…).",
    "configure_callbacks": "Give callbacks to fit.",
}  # fmt: skip
"""Hooks of Lightning's that fitkit doesn't call, and what to write instead."""


def step_arguments(model: Module, step: str) -> tuple[str, ...]:
    """What a step takes beside the batch: `"batch_idx"`, `"optimizer_idx"`, in its order.

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
