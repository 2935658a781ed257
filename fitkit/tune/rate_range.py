"""The learning-rate range test: a short training at a rate that rises with every update.

Reference: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, arXiv:1506.01186.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.ranks import from_all_ranks
from fitkit.callbacks.rates import set_rate, updates_of
from fitkit.callbacks.watches import BatchLosses
from fitkit.errors import ConfigurationError
from fitkit.model import Model
from fitkit.modes import in_use
from fitkit.pictures.rate_curve import rate_curve
from fitkit.tune.untouched import untouched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 0.9
"""How much of the running mean of losses each new one keeps, for seeing that they explode."""

WINDOW = 0.04
"""How far a smoothed loss looks to each side, as a part of all updates."""

SKIPPED = 5
"""Updates at the beginning that make no suggestion."""


class RateRange:
    """The losses at rising learning rates.

    Attributes:
        rates: one an update, rising.
        losses: the mean loss of each update's batches, before it.
        smoothed: their means over a window to both sides, with triangular weights. (A running
            mean would lag behind, and make the suggestion too high.)
        suggestion: the rate where the smoothed losses fall most steeply against the rate's
            logarithm, before the lowest; None where they fall nowhere.
    """

    def __init__(self, rates: list[float], losses: list[float]) -> None:
        self.rates = rates
        self.losses = losses
        self.smoothed = smoothed(losses)

    @property
    def suggestion(self) -> float | None:
        """The rate to train with; None where the losses fall nowhere."""
        place = self._steepest()
        return None if place is None else self.rates[place]

    def _steepest(self) -> int | None:
        slopes = []
        for place in range(SKIPPED, self._lowest()):
            fall = self.smoothed[place + 1] - self.smoothed[place - 1]
            slope = fall / math.log(self.rates[place + 1] / self.rates[place - 1])
            if math.isfinite(slope):
                slopes.append((slope, place))
        if not slopes or min(slopes)[0] >= 0:
            return None
        return min(slopes)[1]

    def _lowest(self) -> int:
        """The place of the lowest loss; after it the training comes apart."""
        finite = [loss if math.isfinite(loss) else math.inf for loss in self.smoothed[:-1]]
        return finite.index(min(finite)) if finite else 0

    def plot(
        self,
        *,
        figure: Any = None,
        axes: Any = None,
        size: tuple[float, float] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draw the losses over the rates, and the suggestion.

        Args:
            figure: a matplotlib Figure to draw in; None makes one that pyplot doesn't know, as
                `history.plot()` does.
            axes: instead, the Axes to draw in.
            size: the new figure's width and height in inches.
            path: a file to write, too: `.png`, `.svg`, `.pdf`, ….

        Returns:
            The figure, which a notebook shows.

        Raises:
            MissingPackageError: matplotlib isn't installed (`pip install 'fitkit[plot]'`).
            ArgumentTypeError: nothing to draw in or to write to.
        """
        return rate_curve(
            self.rates,
            self.losses,
            self.smoothed,
            self._steepest(),
            figure=figure,
            axes=axes,
            size=size,
            path=path,
        )

    def __repr__(self) -> str:
        found = self.suggestion
        text = "none" if found is None else f"{found:.3g}"
        return f"RateRange({len(self.rates)} updates; suggestion: {text})"


def learning_rate(
    model: Model,
    x: Any,
    y: Any = None,
    *,
    batch_size: int = 32,
    sample_weight: Any = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: str = "exponential",
    early_stop_threshold: float | None = 4.0,
) -> RateRange:
    """Try rising learning rates on a compiled model, and say at which one it learns fastest.

    The model trains for some updates, then gets its weights, optimizer and random numbers back.
    Schedulers and warm-up take no part. Several parameter groups keep their rates' ratios.

    Args:
        model: a compiled model; on several devices it trains on them.
        x, y, batch_size, sample_weight: as in `fit`; data that can be read more than once.
        min_lr: the first rate. Default 1e-8.
        max_lr: the last one. Default 1.
        num_training: updates. Default 100.
        mode: whether the rate rises by a constant factor (`"exponential"`, default) or by a
            constant difference (`"linear"`).
        early_stop_threshold: stop where the smoothed loss is above so many times the lowest so
            far. Default 4; None goes on to the end.

    Returns:
        The rates and losses, with `.suggestion` and `.plot()`.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> x = torch.randn(64, 2)
        >>> found = fitkit.tune.learning_rate(model, x, x.sum(1, keepdim=True))
        >>> model.compile(learning_rate=found.suggestion)
    """
    check_number("min_lr", min_lr, above=0)
    check_number("max_lr", max_lr, above=min_lr)
    check_count("num_training", num_training, minimum=SKIPPED + 3)
    check_choice("mode", mode, ("exponential", "linear"))
    check_number("early_stop_threshold", early_stop_threshold, above=1, optional=True)
    if isinstance(x, Iterator):
        raise ConfigurationError(
            f"x is a {type(x).__name__}, which can be read only once, so that fit would find it "
            "used up. Give arrays, a Dataset or a DataLoader."
        )
    rates = [
        _rate(mode, min_lr, max_lr, place / (num_training - 1)) for place in range(num_training)
    ]
    climb = _Climb(rates, early_stop_threshold)
    with in_use(model, "tune.learning_rate", alone=True), untouched(model):
        model.fit(
            x,
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            steps_per_epoch=num_training * model._fitkit.compilation.accumulate_grad_batches,
            callbacks=climb,
            verbose=0,
        )
    return RateRange(rates[: len(climb.losses)], climb.losses)


def _rate(mode: str, low: float, high: float, part: float) -> float:
    return low * (high / low) ** part if mode == "exponential" else low + (high - low) * part


class _Climb(Callback):
    """Sets the rate of each update, and notes the loss before it."""

    stops_alike = True

    def __init__(self, rates: list[float], threshold: float | None) -> None:
        self.rates = rates
        self.threshold = threshold
        self.losses: list[float] = []
        self._batch_losses = BatchLosses()
        self._begun = 0
        self._lowest = math.inf

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begun = updates_of(self.model)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        set_rate(self.model, self.rates[min(len(self.losses), len(self.rates) - 1)])

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._batch_losses.add(batch, logs)
        if updates_of(self.model) - self._begun == len(self.losses):
            return  # Gradients are being accumulated.
        mine = [loss for _, loss in self._batch_losses.take()]
        told = [loss for losses in from_all_ranks(self.model, mine) for loss in losses]
        if not told:
            return
        loss = sum(told) / len(told)
        self.losses.append(loss)
        current = running_mean(self.losses)
        self._lowest = min(self._lowest, current)
        too_high = self.threshold is not None and current > self.threshold * abs(self._lowest)
        if not math.isfinite(loss) or (too_high and len(self.losses) > SKIPPED):
            self.model.stop_training = True


def running_mean(losses: list[float]) -> float:
    """The mean of losses, the later the heavier."""
    mean = 0.0
    for loss in losses:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
    return mean / (1 - SMOOTHING ** len(losses))


def smoothed(losses: list[float]) -> list[float]:
    """The means of losses over a window around each."""
    reach = max(2, round(WINDOW * len(losses)))
    weights = [reach + 1 - abs(offset) for offset in range(-reach, reach + 1)]
    found = []
    for place in range(len(losses)):
        # As far to one side as to the other: else the ends would lean towards the middle.
        side = min(reach, place, len(losses) - 1 - place)
        near = weights[reach - side : reach + side + 1]
        values = losses[place - side : place + side + 1]
        found.append(sum(w * v for w, v in zip(near, values, strict=True)) / sum(near))
    return found
