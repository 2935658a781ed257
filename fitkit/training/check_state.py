"""What a checkpoint says of a training, checked before any of it is used."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from fitkit.arguments import describe
from fitkit.distributed.precision import resolve_precision
from fitkit.errors import CheckpointError, FitkitError, with_code
from fitkit.losses.names import LOSSES
from fitkit.module import REDUCTIONS, LogOptions, Module
from fitkit.optimizers import HOW
from fitkit.progress import Progress
from fitkit.random_states import check_random_state
from fitkit.typing import PlainData

_AS_NOW = (
    "loss", "loss_weights", "lr_scheduler", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "precision", "scale_lr", "warmup_epochs", "effective_batch_size",
)  # fmt: skip
"""What `compile` decides again, whatever the checkpoint was saved with."""

_OBJECT = "an object"
"""Stands for what no file can hold."""


def plain_options(optimizer: Optimizer) -> PlainData:
    """Return what an optimizer was made with, as plain data; schedulers don't change it."""
    options = {
        name: float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in optimizer.defaults.items()
        if name not in HOW
    }
    return {name: value for name, value in options.items() if is_plain(value)}


def differences(model: Module, path: str, compiled: object, training: PlainData) -> str:
    """Return what of `compile`'s arguments contradicts a checkpoint, and which of both holds; "" if
    none.

    A model that was never compiled is only to predict, and nothing is said.

    Args:
        path: what the file is called.
        compiled: what `named_arguments` gave when the file was written.
        training: what `training_state` gave then.
    """
    given = model._fitkit.compilation.given
    if not model._fitkit.compilation.names_optimizer and given.loss is None:
        return ""
    kept = _kept_options(model._fitkit.fit_state.optimizers, training)
    anew = _other_arguments(given.as_dict(), compiled)
    if not kept and not anew:
        return ""
    parts = [f"the file's {', '.join(kept)}"] if kept else []
    parts += [f"compile's {', '.join(anew)}"] if anew else []
    return with_code(
        f"{path} was saved by a model with other compile settings. From now on these apply: "
        f"{'; '.join(parts)}. To resume exactly, compile as before. To load only the weights, use "
        "load_weights.",
        "FK056",
    )


def _kept_options(optimizers: list[Optimizer], training: PlainData) -> list[str]:
    """Return the optimizers' options that the file overrules."""
    found = []
    for optimizer, entry in zip(optimizers, training.get("optimizers", []), strict=False):
        now, then = plain_options(optimizer), entry.get("options", {})
        found += [
            f"{name}={describe(then[name])} (compile gives {value!r})"
            for name, value in now.items()
            if name in then and _plainer(then[name]) != _plainer(value)
        ]
    return found


def _other_arguments(given: dict[str, object], compiled: object) -> list[str]:
    """Return the arguments that overrule the file, where both are known."""
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


def _meaning(name: str, value: object) -> object:
    """Return what tells whether two words mean the same."""
    try:
        if name == "precision":
            return type(resolve_precision(value))
        if name == "loss" and isinstance(value, str):
            return LOSSES[value]
    except FitkitError:  # a word of another version's
        return value
    return _plainer(value)


def _plainer(value: object) -> object:
    """Return a value with lists in place of tuples."""
    return [_plainer(item) for item in value] if isinstance(value, (list, tuple)) else value


def is_plain(value: object) -> bool:
    """Whether a value is data that any file can hold, and no object."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, int, float, bool))


def check_training(training: PlainData, path: str) -> None:
    """Refuse what `training_state` never gives.

    Raises:
        CheckpointError: with what is wrong.
    """
    with _Refusing(path):
        for entry in _dicts("optimizers", training.get("optimizers", [])):
            _has("optimizers", entry, {"class": str, "state": dict})
            _dicts("inner", entry.get("inner", []))
            names = entry.get("names") or []
            if not all(isinstance(name, str) for group in _lists("names", names) for name in group):
                raise ValueError("an optimizer's parameters have names that aren't text")
            options = entry.get("options", {})
            if not isinstance(options, dict) or not is_plain(options):
                raise ValueError("an optimizer's options aren't plain data")
            weights = entry.get("weights", [])
            if not isinstance(weights, list) or not all(
                isinstance(weight, torch.Tensor) for weight in weights
            ):
                raise ValueError("an optimizer's weights aren't tensors")
        for entry in _dicts("schedulers", training.get("schedulers", [])):
            _has("schedulers", entry, {"class": str, "state": dict})
            _check_count("passed", entry.get("passed", 0))
        for entry in _dicts("losses", training.get("losses", [])):
            if not all(isinstance(value, torch.Tensor) for value in entry.values()):
                raise ValueError("the state of a loss has values that aren't tensors")
        for entry in _dicts("scalings", training.get("scalings", [])):
            _has("scalings", entry, {"scaler": dict})
            _check_count("overcounted", entry.get("overcounted"))
            _check_scaler(entry["scaler"])
        _check_count("updates", training.get("updates", 0))
        factor = training.get("rate_factor", 1.0)
        if not _is_number(factor) or not 0 < factor < math.inf:
            raise ValueError(f"rate_factor={describe(factor)} isn't a positive number")


def check_progress(progress: Progress, training: PlainData, path: str) -> None:
    """Refuse what `Fit.checkpoint_progress` never gives.

    Args:
        training: what `check_training` has passed.

    Raises:
        CheckpointError: with what is wrong.
    """
    with _Refusing(path):
        for name in ("epoch", "steps", "number", "batches", "shares"):
            _check_count(name, getattr(progress, name))
        for name in ("began", "random", "orders"):
            if not isinstance(getattr(progress, name), list):
                raise ValueError(f"{name} isn't a list")
        for name in ("seed", "key"):
            number = getattr(progress, name)
            _check_count(name, 0 if number is None else number)
        if progress.shares == 0:
            raise ValueError("shares is 0")
        _has("history", progress.history, {"epoch": list, "history": dict})
        _lists("history", list(progress.history["history"].values()))
        for epoch in progress.history["epoch"]:
            _check_count("an epoch of its history", epoch)
        _dicts("validations", progress.history.get("validations", []))
        if progress.validated is not None:
            _has("validated", progress.validated, {"steps": int, "updates": int, "values": dict})
            for name in ("steps", "updates"):
                _check_count(f"validated {name}", progress.validated[name])
        for entry in _dicts("callbacks", progress.callbacks):
            _has("callbacks", entry, {"class": str, "state": object})
        if not progress.random:
            raise ValueError("random is empty")
        for state in (*progress.random, *progress.began, *progress.orders):
            if state is not None:
                check_random_state(state)
        for noted in _dicts("noted", progress.noted):
            _check_noted(noted)
        if progress.loader is not None:
            _has("loader", progress.loader, {"state": object})
        if progress.warm_up is not None:
            _has("warm_up", progress.warm_up, {"done": int, "targets": list})
            _check_count("done", progress.warm_up["done"])
            if not all(map(_is_single, progress.warm_up["targets"])):
                raise ValueError("a target rate of the warm-up isn't a number")
            groups = [
                len(entry["state"].get("param_groups", ()))
                for entry in training.get("optimizers", [])
            ]
            if groups and len(progress.warm_up["targets"]) != sum(groups):
                raise ValueError(
                    "the target rates of the warm-up don't match the optimizer's parameter groups"
                )
        if not (isinstance(progress.data, dict) and is_plain(progress.data)):
            raise ValueError("data isn't a dict of plain data")


class _Refusing:
    """Turns the errors of its block into one kind, with the file's name.

    Not ValueErrors alone: what a check takes for a dict or a number may be anything.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise CheckpointError(
                f"{self._path} has an invalid training state: {error}. This version of fitkit "
                "doesn't write such files. Nothing was loaded. To load only the weights, use "
                "load_weights."
            ) from error


def check_scheduler_state(scheduler: Any, state: PlainData, path: str) -> None:
    """Refuse what a scheduler like this one never gives.

    Torch's classes put any names and values of a state into the object itself, methods included.

    Args:
        scheduler: one as the state is for; it isn't changed.

    Raises:
        CheckpointError: with the first name that doesn't fit.
    """
    if type(scheduler).__module__ != lr_scheduler.__name__:
        return  # a user's own may keep what it likes
    with _Refusing(path):
        for problem in _misfits(state, scheduler.state_dict(), type(scheduler).__name__):
            raise ValueError(problem)


def try_scheduler_state(scheduler: Any, state: PlainData, path: str) -> None:
    """Refuse a state that a scheduler takes and can't move on from."""
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
        scheduler.optimizer._opt_called = True  # torch warns of a scheduler that moves first
        total = getattr(scheduler, "total_steps", None)
        if total is None or scheduler.last_epoch + 1 < total:
            scheduler.step(*(1.0,) * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        rates = [group["lr"] for group in scheduler.optimizer.param_groups]
        if not all(isinstance(rate, (int, float, torch.Tensor)) for rate in rates):
            raise TypeError("its learning rates aren't numbers")
    except Exception as error:
        raise CheckpointError(
            f"{path} has a state that {type(scheduler).__name__} can't resume from "
            f"({type(error).__name__}: {error}). Nothing was loaded. Use another file, or "
            "load_weights."
        ) from error


def _misfits(found: object, there: object, path: str) -> Iterator[str]:
    """Yield the parts where the value of a scheduler's state has another type than the current
    one.
    """
    if isinstance(there, Counter):  # MultiStepLR's milestones
        counts = [*found, *found.values()] if isinstance(found, Counter) else [found]
        if not all(type(count) is int for count in counts):
            yield f"{path} is {describe(found)}"
    elif isinstance(there, dict) and isinstance(found, dict):
        for name, value in found.items():
            if name in there:
                yield from _misfits(value, there[name], f"{path}[{name!r}]")
            else:
                yield f"{path} has the unknown entry {describe(name)}"
    elif isinstance(there, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(there):
            yield f"{path} has {len(found)} entries instead of {len(there)}"
        for index, (value, entry) in enumerate(zip(found, there, strict=False)):
            yield from _misfits(value, entry, f"{path}[{index}]")
    elif not _is_same_kind(found, there):
        yield f"{path} is {describe(found)}, but a value like {describe(there)} is expected"


def _is_same_kind(found: object, there: object) -> bool:
    if isinstance(there, torch.Tensor) or isinstance(found, torch.Tensor):  # a rate may be one
        return _is_single(found) and _is_single(there)
    if there is None or found is None:
        return not isinstance(found, (dict, list, tuple, set))
    if isinstance(there, float) or isinstance(found, float):
        return _is_number(found) and _is_number(there)
    return type(found) is type(there)


def _is_single(value: object) -> bool:
    """Whether a value is a number, or a tensor of one real number."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return _is_number(value)


def _check_scaler(scaler: PlainData) -> None:
    """Refuse what torch's GradScaler never gives; one that is switched off gives nothing."""
    if not scaler:
        return
    names = ("scale", "growth_factor", "backoff_factor")
    for name in names:
        # After very many infinite losses the scale itself is 0.
        if not _is_number(scaler.get(name)) or not 0 <= scaler[name] < math.inf:
            raise ValueError(f"a loss scaler's {name}={describe(scaler.get(name))} is invalid")
    for name in ("growth_interval", "_growth_tracker"):
        value = scaler.get(name)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ValueError(f"a loss scaler's {name}={describe(value)} is invalid")


def _check_noted(noted: PlainData) -> None:
    _has("noted", noted, {"sums": dict, "metrics": (dict, type(None)), "logged": dict})
    for name in ("steps", "padding", "rank"):
        _check_count(name, noted.get(name, 0))
    for pair in noted["sums"].values():
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(map(_is_number, pair)):
            raise ValueError("a sum and its number of samples aren't two numbers")
    scales = noted.get("scales", {})
    if not isinstance(scales, dict) or not all(map(_is_number, scales.values())):
        raise ValueError("a loss weight isn't a number")
    for entry in noted["logged"].values():
        _has("logged", entry, {"options": dict, "running": (tuple, list), "metric": object})
        if len(entry["running"]) != 2 or not all(map(_is_number, entry["running"])):
            raise ValueError("a logged value and its number of samples aren't two numbers")
        if entry.get("latest") is not None and not _is_number(entry["latest"]):
            raise ValueError("a logged value isn't a number")
        own = entry.get("own")
        if own is not None and not (len(own) == 2 and all(map(_is_number, own))):
            raise ValueError("a logged value and its number of samples aren't two numbers")
        options = dict(entry["options"])
        if options.pop("reduce_fx", None) not in REDUCTIONS:
            raise ValueError("the reduction of a logged value is unknown")
        names = {field.name for field in dataclasses.fields(LogOptions)} - {"reduce_fx"}
        if options.keys() != names or not all(isinstance(v, bool) for v in options.values()):
            raise ValueError("the options of a logged value aren't those of self.log")


def _dicts(name: str, value: object) -> list[PlainData]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{name} isn't a list of dicts")
    return value


def _lists(name: str, value: object) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise ValueError(f"{name} has values that aren't lists")
    return value


def _has(name: str, entry: object, kinds: PlainData) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} isn't a dict")
    for key, kind in kinds.items():
        if key not in entry or not isinstance(entry[key], kind):
            raise ValueError(f"{name} has no usable {key!r}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name}={describe(value)} isn't a number from 0")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
