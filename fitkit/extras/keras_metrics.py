"""Metrics of Keras that a network updates in its call, in the logs of a pass.

Keras keeps a metric's state in the metric. A batch that doesn't count would be in it, such as one
that fills a rank's place. So each pass keeps the state here, and lends it to the metric for a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from fitkit.extras.keras_backend import refusal

# isort: split
import keras
import torch
from keras.src.trainers.trainer import Trainer

from fitkit.errors import ConfigurationError
from fitkit.seams.metrics import LogOptions

OPTIONS = LogOptions(
    on_step=False,
    on_epoch=True,
    prog_bar=True,
    reduce_fx="mean",
    sync_dist=False,
    rank_zero_only=False,
)


def metrics_of(net: Any) -> list[Any]:
    """Return the metrics of a network's own that Keras's `fit` logs."""
    layers = [layer for layer in net._flatten_layers() if layer is net or not is_model(layer)]
    return [metric for layer in layers for metric in layer._metrics]


def is_model(layer: Any) -> bool:
    """Whether a layer is a network with a `fit` of its own, whose metrics others don't log."""
    return isinstance(layer, Trainer)


def is_additive(metric: Any) -> bool:
    """Whether the states of two parts of the data add up to that of both, as in Keras's own."""
    return type(metric).update_state.__module__.startswith("keras.src.")


def not_joined(metric: Any) -> ConfigurationError:
    """Return the error for a metric whose states can't be joined."""
    return refusal(
        f"The net updates {type(metric).__name__} in its call, which has an update_state of its "
        "own, so fitkit can't join what several processes or parts of a training collected. Update "
        "a keras.metrics.Mean or another of Keras's own there."
    )


class CalledMetric:
    """A metric in the passes of one kind, with what `self.log` asks of a torchmetrics object.

    Args:
        metric: the metric.

    Attributes:
        metric: as given.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self._reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._update_count = 0

    @property
    def device(self) -> torch.device:
        """Where the metric has its state."""
        found: torch.device = self.metric.variables[0].value.device
        return found

    def lend(self) -> None:
        """Give the metric the state of the batches so far."""
        if not self._reductions:
            self.metric.reset_state()
        for name, variable in zip(self._reductions, self.metric.variables, strict=False):
            variable.assign(getattr(self, name))

    def taken(self) -> list[torch.Tensor]:
        """Return the metric's state."""
        return [variable.value.detach().clone() for variable in self.metric.variables]

    def keep(self, state: list[torch.Tensor]) -> None:
        """Take what `taken` returned as the state of the batches so far."""
        for number, value in enumerate(state):
            name = f"state_{number}"
            self._reductions[name] = self._summed
            setattr(self, name, value)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) > 1 and not is_additive(self.metric):
            raise not_joined(self.metric)
        return values.sum(0, dtype=values.dtype)

    def compute(self) -> torch.Tensor:
        """Return the metric's result for the batches so far."""
        state = [getattr(self, name) for name in self._reductions]
        with keras.device(str(self.device)):
            found = self.metric.stateless_result(state)
            if isinstance(found, dict):
                raise refusal(
                    f"The net updates {type(self.metric).__name__} in its call, which computes "
                    "several values. Update a metric for each."
                )
            result: torch.Tensor = keras.ops.convert_to_tensor(found)
        return result

    def reset(self) -> None:
        """Forget all batches."""
        self._reductions = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CalledMetric:
        made = copy.copy(self)  # the metric has nothing of its own but what it is lent
        made._reductions = dict(self._reductions)
        return made
