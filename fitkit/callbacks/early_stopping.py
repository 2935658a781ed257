"""Early stopping of a training."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from fitkit.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    only_known_arguments,
)
from fitkit.buffers import Place, resize_buffers
from fitkit.callbacks.base import Callback, Logs, print_on_rank_zero
from fitkit.callbacks.monitor import Monitor
from fitkit.checkpoint import uncompiled
from fitkit.typing import Mode

KEPT = ("best", "best_epoch", "wait", "stopped_epoch", "best_weights")
"""The attributes that a checkpoint keeps."""


class EarlyStopping(Callback):
    """Ends `fit` when the monitored value has stopped improving.

    An epoch is an improvement if its value is better than the best so far by more than
    `min_delta`. NaN never is. Epochs without the value (`validation_freq`) don't count. If `fit`
    validates several times per epoch, each validation counts as an epoch.

    Args:
        monitor: the name of a value in the epoch's logs. Default `"val_loss"`.
        min_delta: the smallest improvement that counts, at least 0. Default 0.
        patience: the number of epochs without improvement after which to stop. Default 0, which
            means the same as 1.
        verbose: 1 prints when training stops and which weights are restored. Default 0.
        mode: `"min"`, `"max"` or `"auto"` (default), which infers it from the name.
        baseline: a value to beat. Improvements that don't reach it don't reset the patience.
        restore_best_weights: whether the model, and losses that are modules, get the weights and
            buffers of the best epoch when `fit` ends, early or not, also after an error or Ctrl-C.
            The optimizer's state stays. Copies are kept in main memory. Default False.
        start_from_epoch: the first epoch (from 0) to look at. Default 0.
        stopping_threshold: end `fit` once the value is better than this. Default None.
        divergence_threshold: end `fit` once the value is worse than this. Default None.
        check_finite: whether to end `fit` at once when the value is NaN or infinite. Default False
            (Lightning: True).

    Attributes:
        best: the best value so far; infinite before the first.
        best_epoch: the epoch of the best value, from 0.
        wait: the number of epochs since the best.
        stopped_epoch: the epoch in which training stopped; 0 if it did not.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also at the end of the first
            epoch that should have the value, if the logs don't have it.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse", learning_rate=0.0)  # nothing improves
        >>> stop = fitkit.callbacks.EarlyStopping("loss", patience=2)
        >>> x, y = torch.ones(32, 2), torch.ones(32, 1)
        >>> history = model.fit(x, y, epochs=9, verbose=0, callbacks=stop)
        >>> len(history.epoch)
        3
    """

    stops_alike = True

    @only_known_arguments
    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
        *,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = False,
    ) -> None:
        patience = check_count("patience", patience, minimum=0)
        verbose = check_choice("verbose", verbose, (0, 1, False, True))
        baseline = check_number("baseline", baseline, optional=True)
        restore_best_weights = check_flag("restore_best_weights", restore_best_weights)
        start_from_epoch = check_count("start_from_epoch", start_from_epoch, minimum=0)
        stopping_threshold = check_number("stopping_threshold", stopping_threshold, optional=True)
        divergence_threshold = check_number(
            "divergence_threshold", divergence_threshold, optional=True
        )
        check_finite = check_flag("check_finite", check_finite)
        self.monitor = monitor
        self._monitored = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_finite = check_finite
        self._reset()

    def _reset(self) -> None:
        self.best: float = self._monitored.worst
        self.best_epoch: int = 0
        self.wait: int = 0
        self.stopped_epoch: int = 0
        self._said = ""
        self._last = math.nan
        self.best_weights: dict[str, Any] | None = None
        self._best_beside: dict[str, torch.Tensor] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()
        self._monitored.begin(self)
        self.add_cleanup(self._leave)

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        value = self._monitored.read_within(self, logs)
        self._take(value, self.model.current_epoch, f"in epoch {{}}, at batch {batch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._take(self._monitored.read(self, logs), epoch, "after epoch {}")

    def _take(self, value: float | None, epoch: int, when: str) -> None:
        if value is None or epoch < self.start_from_epoch:
            return
        self._last = value
        if self.restore_best_weights and self.best_weights is None:
            self._keep_weights(epoch)  # even if the first epoch is NaN
        self.wait += 1
        if self._monitored.better(value, self.best):
            self.best = value
            self._keep_weights(epoch)
            if self.baseline is None or self._monitored.better(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and (epoch > 0 or self.best != self._monitored.worst):
            self._stop(epoch, when)
        reason = self._reason(value)
        if reason:
            self._stop(epoch, when, f": {self.monitor} is {value:g}, {reason}")

    def _reason(self, value: float) -> str:
        """Why a value ends the training whatever the patience; empty if it doesn't."""
        if self.check_finite and not math.isfinite(value):
            return "not finite"
        good, bad = self.stopping_threshold, self.divergence_threshold
        lower = self._monitored.mode == "min"
        if good is not None and (value < good if lower else value > good):
            return f"better than stopping_threshold={good:g}"
        if bad is not None and (value > bad if lower else value < bad):
            return f"worse than divergence_threshold={bad:g}"
        return ""

    def _stop(self, epoch: int, when: str, why: str = "") -> None:
        self.stopped_epoch = epoch
        self._said = f"Stopped early {when.format(epoch + 1)}{why}."
        self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._said and self.verbose:
            print_on_rank_zero(self.model, self._said)
        if self.best_weights is None:
            return
        if self.verbose:
            print_on_rank_zero(
                self.model, f"Restored the best weights, those of epoch {self.best_epoch + 1}."
            )
        self._restore()

    def _leave(self) -> None:
        """Restore the best weights after an error or Ctrl-C, too."""
        # Weights that are divided among the ranks can't be put back without the others.
        if self.best_weights is not None and self.model._fitkit.compilation.strategy.engine is None:
            self._restore()
        self.best_weights = None

    def _restore(self) -> None:
        weights, self.best_weights = self.best_weights, None
        assert weights is not None
        with uncompiled(self.model._weights_module()) as module:
            resize_buffers(module, weights)
            module.load_state_dict(weights)
        places = self._places_beside()
        for name, value in self._best_beside.items():
            if name in places:
                places[name].put(value)

    def _places_beside(self) -> dict[str, Place]:
        return self.model._fitkit.compilation.trained(self.model).places_unlisted()

    def _keep_weights(self, epoch: int) -> None:
        self.best_epoch = epoch
        if self.restore_best_weights:
            # Within an epoch, a schedule-free optimizer holds the weights that it trains at.
            evaluated = self.model._fitkit.fit_state.evaluated()
            # By the names that a resumed training has, too, if only one of them is compiled.
            own_names = uncompiled(self.model._weights_module())
            with self._monitored.weights(self), evaluated, own_names as module:
                self.best_weights = copied_to_host(module.state_dict())
                held = {name: place.tensor for name, place in self._places_beside().items()}
                self._best_beside = copied_to_host(
                    {name: tensor for name, tensor in held.items() if tensor is not None}
                )

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in KEPT}
        return {**kept, "said": self._said, "last": self._last, "beside": self._best_beside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update((name, state[name]) for name in KEPT)
        self._last = float(state.get("last", math.nan))
        self._best_beside = dict(state.get("beside", {}))
        said = state.get("said", "")
        # It had ended the training. With more patience or another threshold it goes on.
        if said and (self.wait >= self.patience or self._reason(self._last)):
            self._said = said
            self.model.stop_training = True
        else:
            self.stopped_epoch = 0


def copied_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a module's state dict, with its tensors in main memory."""
    return {
        name: value.detach().to("cpu", copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in state.items()
    }
