"""What a checkpoint says of a training, looked at before any of it is used.

A digest tells accidents, not forgery: a file may have any JSON under a right one. What is of
another form than fitkit writes is refused here, while the model is still as it was.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch

from fitkit.arguments import describe
from fitkit.errors import CheckpointError
from fitkit.training.differences import is_plain
from fitkit.training.progress import Progress


def check_training(training: dict[str, Any], path: str) -> None:
    """Refuse what `training_state` never gives.

    Raises:
        CheckpointError: with what is wrong.
    """
    with _Refusing(path):
        for entry in _dicts("optimizers", training.get("optimizers", [])):
            _has("optimizers", entry, {"class": str, "state": dict})
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
        for entry in _dicts("scalings", training.get("scalings", [])):
            _has("scalings", entry, {"scaler": dict, "overcounted": int})
            if not all(_is_number(value) for value in entry["scaler"].values()):
                raise ValueError("a loss scale isn't a number")
        _check_count("updates", training.get("updates", 0))
        factor = training.get("rate_factor", 1.0)
        if not _is_number(factor) or not 0 < factor < math.inf:
            raise ValueError(f"rate_factor={describe(factor)} isn't a positive number")


def check_progress(progress: Progress, path: str) -> None:
    """Refuse what `progress_of` never gives.

    Raises:
        CheckpointError: with what is wrong.
    """
    with _Refusing(path):
        for name in ("epoch", "steps", "number", "batches"):
            _check_count(name, getattr(progress, name))
        for name in ("seed", "shares"):
            _check_count(name, getattr(progress, name) or 0)
        _has("history", progress.history, {"epoch": list, "history": dict})
        _lists("history", list(progress.history["history"].values()))
        for epoch in progress.history["epoch"]:
            _check_count("an epoch of its history", epoch)
        for entry in _dicts("callbacks", progress.callbacks):
            _has("callbacks", entry, {"class": str, "state": object})
        if not progress.random:
            raise ValueError("random is empty")
        for state in (*progress.random, *(began for began in progress.began if began is not None)):
            _check_random_state(state)
        for notes in _dicts("noted", progress.noted):
            _check_notes(notes)
        if progress.loader is not None:
            _has("loader", progress.loader, {"state": object})
        if progress.warm_up is not None:
            _has("warm_up", progress.warm_up, {"done": int, "targets": list})
            targets = progress.warm_up["targets"]
            if not all(_is_number(t) or isinstance(t, torch.Tensor) for t in targets):
                raise ValueError("a rate to warm up to isn't a number")
        if progress.data is not None and not isinstance(progress.data, dict):
            raise ValueError("data isn't a dict")


class _Refusing:
    """Turns the ValueErrors of its block into one kind of error, with the file's name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError):
            raise CheckpointError(
                f"{self._path} is refused: of its training, {error}. This version of fitkit didn't "
                "write that. Nothing was loaded; its weights can be read by load_weights."
            ) from error


def _check_notes(notes: dict[str, Any]) -> None:
    _has("noted", notes, {"sums": dict, "metrics": (dict, type(None)), "logged": dict})
    for name in ("steps", "fillers", "rank"):
        _check_count(name, notes.get(name, 0))
    for pair in notes["sums"].values():
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(map(_is_number, pair)):
            raise ValueError("a sum and its number of samples aren't two numbers")


def _check_random_state(state: Any) -> None:
    """Refuse a state that no generator takes, by giving it to generators that nobody uses."""
    if not isinstance(state, dict):
        raise ValueError("a random state isn't a dict")
    try:
        version, numbers, gauss = state["python"]
        random.Random().setstate((version, tuple(numbers), gauss))
        np.random.RandomState().set_state(state["numpy"])
        for own in (state["torch"], *state["own"]):
            if not _is_of_a_gpu(own):
                torch.Generator().set_state(own)
    except Exception as error:  # each library raises what it likes
        raise ValueError(f"a random state can't be one ({error})") from error
    if not all(map(_is_of_a_gpu, state.get("cuda") or [])):
        raise ValueError("a random state of a GPU isn't 16 bytes")


def _is_of_a_gpu(state: Any) -> bool:
    """Whether a state has the form of a CUDA generator's: a seed and an offset."""
    return isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.numel() == 16


def _dicts(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{name} isn't a list of dicts")
    return value


def _lists(name: str, value: Any) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise ValueError(f"{name} has something else than lists")
    return value


def _has(name: str, entry: Any, kinds: dict[str, Any]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} isn't a dict")
    for key, kind in kinds.items():
        if key not in entry or not isinstance(entry[key], kind):
            raise ValueError(f"{name} has no usable {key!r}")


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name}={describe(value)} isn't a number from 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
