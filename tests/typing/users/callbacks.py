# pyright: strict
"""Callbacks of fitkit's and of one's own."""

from typing import Any

import torch

import fitkit
from fitkit.callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, RunFolder


class Best(Callback):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.best = float("inf")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.best = min(self.best, (logs or {}).get(self.name, self.best))


best = Best("val_loss")
model = fitkit.Model(torch.nn.Linear(4, 1))
model.compile("adam", "mse")
model.fit(
    torch.rand(64, 4),
    torch.rand(64, 1),
    validation_split=0.25,
    callbacks=[
        best,
        EarlyStopping("val_loss", patience=2, mode="min", restore_best_weights=True),
        ModelCheckpoint("best.h5", monitor="val_loss", mode="auto", save_best_only=True),
        ReduceLROnPlateau(factor=0.5, mode="min"),
        RunFolder("runs", monitor="val_loss", mode="max"),
        "terminate_on_nan",
    ],
)
print(f"{best.best:.3f}")
