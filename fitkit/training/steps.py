"""One batch's forward, loss and metrics, as `compile` described them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fitkit import trees
from fitkit.data.batches import unpack
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sharding import Share
from fitkit.data.transfer import Transfer
from fitkit.errors import FitkitError
from fitkit.losses import CompiledLoss
from fitkit.training.calling import Caller
from fitkit.training.explain import explained
from fitkit.training.logbook import Logbook

LABEL_KEYS = ("labels", "label")
"""Where a dict batch without `y` carries its targets, by Hugging Face's custom."""


class CompiledStep:
    """Computes batches' losses and keeps the pass's running values.

    What can't change within a call of a verb is decided in the constructor or at the first
    batch, so that a step does no more than a hand-written loop does.

    Args:
        door: the way into the net's forward.
        caller: how inputs enter it.
        transfer: brings a batch to the device.
        loss: the compiled loss.
        logbook: where losses and metrics are noted.
        class_weights: weights by label; training only.
        all_targets: every target of in-memory data, whose labels are checked at once.

    Attributes:
        samples: of the last batch on this rank; 0 where it only filled a place.
        total: of the last batches on all ranks.
    """

    def __init__(
        self,
        door: Callable[..., Any],
        caller: Caller,
        transfer: Transfer,
        loss: CompiledLoss,
        logbook: Logbook,
        class_weights: ClassWeights | None = None,
        all_targets: Any = None,
    ) -> None:
        self.door = door
        self.caller = caller
        self.transfer = transfer
        self.loss = loss
        self.logbook = logbook
        self.meters = logbook.meters if logbook.meters.has_metrics else None
        self.class_weights = class_weights
        self.all_targets = all_targets
        self.checked = False
        self.samples = 0
        self.total = 0

    def __call__(self, batch: Any) -> torch.Tensor:
        """The batch's loss, noted in the logbook with the metrics.

        Raises:
            ConfigurationError: a batch that the net, loss or metrics can't take, in the terms
                of what the user passed; torch's own error is its cause.
        """
        share = batch if type(batch) is Share else None
        x, y, weight = unpack(self.transfer(batch if share is None else share.batch))
        prediction, loss, parts = self._compute(x, y, weight)
        samples = x.shape[0] if isinstance(x, torch.Tensor) and x.ndim else trees.sample_count(x)
        self.samples = self.total = samples
        if share is not None:
            self.total = share.total
            if share.muted:
                self.samples = 0
                return loss
        logbook = self.logbook
        logbook.loss.add(loss.detach(), samples)
        if parts:
            logbook.add_parts(parts, samples)
        if self.meters is not None:
            with torch.no_grad():
                self.meters.update(prediction, target_of(x, y), weight)
        return loss

    def again(self, batch: Any) -> torch.Tensor:
        """The batch's loss once more, noted nowhere (LBFGS computes it several times)."""
        x, y, weight = unpack(self.transfer(batch.batch if type(batch) is Share else batch))
        return self._compute(x, y, weight)[1]

    def _compute(
        self, x: Any, y: Any, weight: Any
    ) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
        try:
            prediction = self.caller(self.door, x)
            if not self.checked:
                self._check(prediction, x, y)
            if self.class_weights is not None:
                weight = self.class_weights(y, weight)
            loss, parts = self.loss(prediction, y, weight)
        except FitkitError:
            raise
        except Exception as error:
            explanation = explained(error, self.door, x, y)
            if explanation is None:
                raise
            raise explanation from error
        return prediction, loss, parts

    def _check(self, prediction: Any, x: Any, y: Any) -> None:
        """Look at the first batch: everything that can be said before an update is."""
        with torch.no_grad():
            self.loss.check(prediction, y)
            if self.all_targets is not None:
                self.loss.check_labels(self.all_targets)
            if self.meters is not None:
                self.meters.start(prediction, target_of(x, y), self.loss.hint)
        self.checked = True


def target_of(x: Any, y: Any) -> Any:
    """The targets that metrics see: `y`, or the labels inside a dict batch."""
    if y is None and isinstance(x, Mapping):
        for key in LABEL_KEYS:
            if key in x:
                return x[key]
    return y


class PredictStep:
    """Computes the net's outputs for batches.

    Args:
        door, caller, transfer: as in `CompiledStep`.
    """

    def __init__(self, door: Callable[..., Any], caller: Caller, transfer: Transfer) -> None:
        self.door = door
        self.caller = caller
        self.transfer = transfer

    def __call__(self, batch: Any) -> Any:
        """The net's outputs for the batch's inputs; targets and weights are not looked at."""
        x, _, _ = unpack(self.transfer(batch))
        try:
            return self.caller(self.door, x)
        except FitkitError:
            raise
        except Exception as error:
            explanation = explained(error, self.door, x, None)
            if explanation is None:
                raise
            raise explanation from error
