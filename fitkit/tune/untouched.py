"""Trying something out on a model that is as before afterwards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from fitkit.model import Model

NOTES = ("history", "stop_training", "current_epoch", "_batch_size", "_log_names")
"""What a fit leaves on a model beside its weights."""

WITHOUT = {"warmup_epochs": None, "scale_lr": None, "lr_scheduler": None}
"""Arguments of compile that would change rates while something is tried."""


@contextlib.contextmanager
def untouched(model: Model) -> Iterator[None]:
    """Put weights, optimizers, schedulers, notes and random numbers back at the end.

    Meanwhile nothing changes the learning rates by itself. The model, its parameters and its
    optimizers stay the same objects.
    """
    compilation, state = model._fitkit.compilation, model._fitkit.fit_state
    weights = [(tensor, _copied(tensor)) for tensor in _tensors(model)]
    notes = {name: vars(model)[name] for name in NOTES if name in vars(model)}
    had = dict(vars(state))
    optimizers = [(optimizer, _content(optimizer)) for optimizer in state.optimizers]
    numbers = random.getstate(), np.random.get_state()
    model._fitkit.compilation = dataclasses.replace(
        compilation, given={**compilation.given, **WITHOUT}, scheduler=None
    )
    state.schedulers = []
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model._fitkit.compilation = compilation
        vars(state).update(had)
        for optimizer, content in optimizers:
            _put_content(optimizer, content)
        _put_back(weights)
        for name in NOTES:
            vars(model).pop(name, None)
        vars(model).update(notes)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])


def _tensors(model: Model) -> list[torch.Tensor]:
    """All that a training changes in place."""
    return [*model.parameters(), *model.buffers(), *model._fitkit.compilation.loss_parameters()]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # In main memory: a copy on the device would leave less of it for what is tried.
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _put_back(weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, before in weights:
        tensor.copy_(before)


def _content(optimizer: Optimizer) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """An optimizer's state and its groups' options, copied."""
    state = {parameter: copy.deepcopy(own) for parameter, own in optimizer.state.items()}
    options = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    return state, copy.deepcopy(options)


def _put_content(
    optimizer: Optimizer, content: tuple[dict[Any, Any], list[dict[str, Any]]]
) -> None:
    state, options = content
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for name in set(group) - set(before) - {"params"}:
            del group[name]
        group.update(before)
