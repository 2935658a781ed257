"""Lowering the learning rate when a value no longer improves."""

from __future__ import annotations

from typing import Any

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.learner import change_rates, rate_of, refuse_scheduler
from fitkit.callbacks.monitor import Monitor, announce_prefix
from fitkit.callbacks.ranks import say

KEPT = ("best", "wait", "cooldown_counter")
"""What a checkpoint keeps of it."""


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rates when the monitored value has not improved for some epochs.

    Adds `learning_rate`, the rate that the epoch used, to the epoch's logs.

    Args:
        monitor: a name of the epoch's logs. Default `"val_loss"`.
        factor: by which the rates are multiplied, above 0 and below 1. Default 0.1.
        patience: epochs without improvement after which to do so. Default 10.
        verbose: 1 says it. Default 0.
        mode: `"min"`, `"max"` or `"auto"` (default): by the name, where it tells.
        min_delta: the least improvement that counts. Default 1e-4.
        cooldown: epochs after a reduction in which nothing is counted. Default 0.
        min_lr: no rate becomes lower. Default 0.

    Attributes:
        best: the best value so far.
        wait: epochs since.
        cooldown_counter: epochs of the cooldown that are left.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be; when fit begins, a
            scheduler that sets the rates too.
    """

    stops_alike = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        check_number("factor", factor, above=0, below=1)
        check_count("patience", patience, minimum=0)
        check_choice("verbose", verbose, (0, 1, False, True))
        check_count("cooldown", cooldown, minimum=0)
        check_number("min_lr", min_lr, minimum=0)
        self.monitor = monitor
        self._watch = Monitor(monitor, mode, min_delta, type(self).__name__)
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best = self._watch.worst
        self.wait = 0
        self.cooldown_counter = 0

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        announce_prefix(params, "learning_rate")

    def on_train_begin(self, logs: Logs | None = None) -> None:
        refuse_scheduler(self.model, type(self).__name__)
        self._reset()
        self._watch.begin(self.model, self.params)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.setdefault("learning_rate", rate_of(self.model))
        value = self._watch.read(self.model, self.params, logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._watch.better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        if not change_rates(self.model, self._lowered):
            return  # All are at their lowest.
        self.cooldown_counter = self.cooldown
        self.wait = 0
        if self.verbose:
            rate = rate_of(self.model)
            say(self.model, f"Epoch {epoch + 1}: the learning rate becomes {rate:.4g}.")

    def _lowered(self, rate: float) -> float:
        return rate if rate <= self.min_lr else max(rate * self.factor, self.min_lr)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update((name, state[name]) for name in KEPT)
