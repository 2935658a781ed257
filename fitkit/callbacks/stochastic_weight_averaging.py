"""Stochastic weight averaging: the mean of the weights at the ends of the last epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_number
from fitkit.callbacks.averaged_weights import AveragedWeights
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.learner import groups_of
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.modes import kept_in_evaluation, modes_restored, to_training
from fitkit.optimizers import put_rate

CURVES = {"cos": lambda part: (1 - math.cos(math.pi * part)) / 2, "linear": lambda part: part}
"""How far the rate has come when a part of the annealing is over, both from 0 to 1."""


class StochasticWeightAveraging(Callback):
    """Averages the weights at the ends of the last epochs, at a rate that stays high.

    From the epoch `swa_epoch_start` on the rates go to `swa_lrs` over `annealing_epochs`
    epochs, and the weights at each epoch's end enter a plain mean. When `fit` ends, the model
    gets the mean; validations before that see the weights themselves.

    Batch normalization's running statistics don't belong to averaged weights. They are computed
    anew from `bn_data`, or, without it, averaged like the weights, which is often close.

    Args:
        swa_lrs: the rate of the averaged epochs, above 0; a list for several parameter groups.
        swa_epoch_start: the first such epoch: its number (from 0), or a fraction of `epochs`.
            Default 0.8.
        annealing_epochs: how long the rates take to get there. Default 10.
        annealing_strategy: `"cos"` (default) or `"linear"`.
        bn_data: batches of inputs (or `(inputs, …)`), such as a DataLoader, that can be
            iterated, on every rank. Default None.

    Attributes:
        averaged: how many epochs' weights are in the mean.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be; when fit begins, a
            scheduler that sets the rates at each step.

    Reference: Izmailov et al., Averaging Weights Leads to Wider Optima and Better
    Generalization, 2018, arXiv:1803.05407.
    """

    stops_alike = True

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        bn_data: Iterable[Any] | None = None,
    ) -> None:
        for rate in swa_lrs if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]:
            check_number("swa_lrs", rate, above=0)
        if isinstance(swa_epoch_start, float):
            check_number("swa_epoch_start", swa_epoch_start, minimum=0, below=1)
        else:
            check_count("swa_epoch_start", swa_epoch_start, minimum=0)
        check_count("annealing_epochs", annealing_epochs, minimum=0)
        check_choice("annealing_strategy", annealing_strategy, tuple(CURVES))
        # Not `iter(bn_data)`: a DataLoader would draw from the training's random numbers there.
        is_spent = hasattr(bn_data, "__next__")
        if bn_data is not None and (is_spent or not isinstance(bn_data, Iterable)):
            raise ArgumentTypeError(
                "bn_data must be batches that can be iterated more than once, like a DataLoader "
                "or a list of tensors."
            )
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.bn_data = bn_data
        self._reset()

    def _reset(self) -> None:
        self.averaged = 0
        self._weights: AveragedWeights | None = None
        self._rates: list[float] = []
        self._first = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weights": None}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()
        if any(plan.interval == "step" for plan in self.model._fitkit.fit_state.schedulers):
            raise ConfigurationError(
                "StochasticWeightAveraging sets the rates of its epochs, but an lr_scheduler "
                "sets them at each step. Use one with interval='epoch', or none."
            )
        start = self.swa_epoch_start
        epochs = int(self.params["epochs"])
        self._first = int(epochs * start) if isinstance(start, float) else start
        if self._first >= epochs:
            raise ConfigurationError(
                f"swa_epoch_start={start} is after the last epoch: fit has epochs={epochs}."
            )
        self._targets()

    def _targets(self) -> list[float]:
        groups = len(list(groups_of(self.model)))
        if not isinstance(self.swa_lrs, (list, tuple)):
            return [float(self.swa_lrs)] * groups
        if len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"swa_lrs has {len(self.swa_lrs)} rates, but the optimizer has {groups} "
                "parameter groups."
            )
        return [float(rate) for rate in self.swa_lrs]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch < self._first:
            return
        if not self._rates:
            self._rates = [float(group["lr"]) for group in groups_of(self.model)]
        passed = epoch - self._first
        part = min(passed / self.annealing_epochs, 1.0) if self.annealing_epochs else 1.0
        done = CURVES[self.annealing_strategy](part)
        changes = zip(groups_of(self.model), self._rates, self._targets(), strict=True)
        for group, begin, target in changes:
            put_rate(group, target if done == 1.0 else begin + (target - begin) * done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if epoch < self._first:
            return
        if self._weights is None:
            self._begin_average()
        assert self._weights is not None
        self._weights.update()
        self.averaged = self._weights.count

    def _begin_average(self) -> None:
        self._weights = AveragedWeights(self.model, get_swa_multi_avg_fn(), buffers=True)

    def on_train_end(self, logs: Logs | None = None) -> None:
        weights, self._weights = self._weights, None
        if weights is None:
            return
        weights.put_in()
        if self.bn_data is not None:
            renew_statistics(self.model, self.bn_data, self.model.device)

    def state_dict(self) -> dict[str, Any]:
        weights = None if self._weights is None else self._weights.state_dict()
        return {"averaged": self.averaged, "rates": self._rates, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaged = int(state["averaged"])
        self._rates = list(state["rates"])
        if state["weights"] is not None:
            self._begin_average()
            assert self._weights is not None
            self._weights.load_state_dict(state["weights"])


@torch.no_grad()
def renew_statistics(model: torch.nn.Module, data: Iterable[Any], device: torch.device) -> None:
    """Compute batch normalization's running statistics anew: plain means over batches.

    Layers that stay in evaluation mode in training keep theirs.
    """
    kept = kept_in_evaluation(model)
    layers = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        and module.track_running_stats
        and module not in kept
    ]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch: a plain mean instead of a moving one
    try:
        with modes_restored(model):
            to_training(model, kept)
            for batch in data:
                inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
                _forward(model, trees.map_leaves(lambda leaf: _moved(leaf, device), inputs))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _forward(model: torch.nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        model(**inputs)
    elif isinstance(inputs, tuple):
        model(*inputs)
    else:
        model(inputs)


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
