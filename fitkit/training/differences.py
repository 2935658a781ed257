"""A model that is compiled otherwise than the one whose checkpoint it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fitkit.arguments import describe
from fitkit.distributed.precision import resolve_precision
from fitkit.errors import FitkitError
from fitkit.losses.names import LOSSES
from fitkit.optimizers import HOW

if TYPE_CHECKING:
    from fitkit.model import Model

_AS_NOW = (
    "loss", "loss_weights", "lr_scheduler", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "precision", "scale_lr", "warmup_epochs",
)  # fmt: skip
"""What `compile` decides anew, whatever the checkpoint was saved with."""

_OBJECT = "an object"
"""Stands for what no file can hold."""


def plain_options(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer was made with, as plain data; schedulers don't change it."""
    options = {
        name: float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in optimizer.defaults.items()
        if name not in HOW
    }
    return {name: value for name, value in options.items() if is_plain(value)}


def differences(model: Model, path: str, compiled: object, training: dict[str, Any]) -> str:
    """What of `compile`'s arguments contradicts a checkpoint, and which of both holds; "" if none.

    A model that was never compiled is only to predict, and nothing is said.

    Args:
        path: what the file is called.
        compiled: what `named_arguments` gave when the file was written.
        training: what `training_state` gave then.
    """
    given = model._fitkit.compilation.given
    if not model._fitkit.compilation.names_optimizer and given["loss"] is None:
        return ""
    kept = _kept_options(model._fitkit.fit_state.optimizers, training)
    anew = _other_arguments(given, compiled)
    if not kept and not anew:
        return ""
    parts = [f"the file's {', '.join(kept)}"] if kept else []
    parts += [f"compile's {', '.join(anew)}"] if anew else []
    return (
        f"{path} was saved by a model that was compiled otherwise. What holds from now on: "
        f"{'; '.join(parts)}. To go on exactly, compile as then; to take the weights alone, use "
        "load_weights."
    )


def _kept_options(optimizers: list[Optimizer], training: dict[str, Any]) -> list[str]:
    """The optimizers' options that the file overrules."""
    found = []
    for optimizer, entry in zip(optimizers, training.get("optimizers", []), strict=False):
        now, then = plain_options(optimizer), entry.get("options", {})
        found += [
            f"{name}={describe(then[name])} (compile gives {value!r})"
            for name, value in now.items()
            if name in then and _plainer(then[name]) != _plainer(value)
        ]
    return found


def _other_arguments(given: dict[str, Any], compiled: object) -> list[str]:
    """The arguments that overrule the file, where both are known."""
    named = compiled.get("named") if isinstance(compiled, dict) else None
    if not isinstance(named, dict):
        return []
    found = []
    for name in _AS_NOW:
        now, then = given[name], named.get(name, _OBJECT)
        # Whether an object means the same as another object or a word can't be known.
        known = None in (now, then) or (is_plain(now) and then != _OBJECT)
        if known and _meaning(name, now) != _meaning(name, then):
            found.append(f"{name}={now!r} (the file has {describe(then)})")
    return found


def _meaning(name: str, value: Any) -> Any:
    """What tells whether two words mean the same."""
    try:
        if name == "precision":
            return type(resolve_precision(value))
        if name == "loss" and isinstance(value, str):
            return LOSSES[value]
    except FitkitError:  # a word of another version's
        return value
    return _plainer(value)


def _plainer(value: Any) -> Any:
    """A value with lists in place of tuples."""
    return [_plainer(item) for item in value] if isinstance(value, (list, tuple)) else value


def is_plain(value: Any) -> bool:
    """Whether a value is data that any file can hold, and no object."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, int, float, bool))
