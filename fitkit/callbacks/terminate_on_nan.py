"""Ending a training whose loss is no longer a number."""

from __future__ import annotations

import math
from typing import Any

from fitkit.arguments import check_count, check_flag
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.ranks import any_rank
from fitkit.errors import FitkitError


class NonFiniteError(FitkitError, FloatingPointError):
    """A value that should be a number is NaN or infinite."""


class TerminateOnNaN(Callback):
    """Ends `fit` when the loss is NaN or infinite, on whichever rank.

    The device isn't asked after every batch: the running mean stays non-finite once a batch's
    loss was, so it is read every `check_every` batches and at each epoch's end.

    Args:
        raise_error: whether to raise instead of stopping. Default False.
        check_every: batches between two looks. Default 10.

    Raises:
        NonFiniteError: from `fit`, with `raise_error`; a `FloatingPointError`.
    """

    stops_alike = True

    def __init__(self, raise_error: bool = False, check_every: int = 10) -> None:
        check_flag("raise_error", raise_error)
        check_count("check_every", check_every)
        self.raise_error = raise_error
        self.check_every = check_every
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if (batch + 1) % self.check_every == 0:
            self._check(logs, f"by batch {batch}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._check(logs, "at its end")

    def _check(self, logs: Logs, when: str) -> None:
        loss = logs.get("loss")
        if not any_rank(self.model, loss is not None and not math.isfinite(loss)):
            return
        if self.raise_error:
            raise NonFiniteError(
                f"The loss became NaN or infinite in epoch {self._epoch + 1} ({when}). "
                "fitkit.callbacks.DetectNonFinite() names the module where that begins."
            )
        self.model.stop_training = True
