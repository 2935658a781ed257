"""The record of a training."""

from __future__ import annotations

from typing import Any

from fitkit.callbacks.base import Callback, Logs


class History(Callback):
    """The values of each epoch; what `fit` returns, and `model.history` afterwards.

    Attributes:
        history: name → list of floats, one an epoch. Values that only some epochs have
            (`val_…` with `validation_freq`) have shorter lists, without padding.
        epoch: the epochs' numbers, from 0.
        params: what is known of the run.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []
        self.params = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.history = {}
        self.epoch = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def __repr__(self) -> str:
        last = ", ".join(
            f"{name}={values[-1]:.4g}" if isinstance(values[-1], float) else name
            for name, values in self.history.items()
        )
        return f"History({len(self.epoch)} epochs{'; last: ' + last if last else ''})"
