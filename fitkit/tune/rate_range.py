"""The learning-rate range test: a short training at a rate that rises with every update.

Reference: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, arXiv:1506.01186.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.batch_losses import BatchLosses
from fitkit.callbacks.learner import set_rate, updates_of
from fitkit.callbacks.ranks import from_all_ranks
from fitkit.errors import ConfigurationError, missing_package
from fitkit.model import Model
from fitkit.tune.untouched import untouched

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

    def plot(self, axes: Any = None) -> Any:
        """Draw the losses over the rates, and the suggestion.

        Args:
            axes: matplotlib's axes to draw in; None makes a figure.

        Returns:
            The axes.

        Raises:
            MissingPackageError: matplotlib isn't there.
        """
        if axes is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError:
                raise missing_package("matplotlib", "plot", "RateRange.plot()") from None
            _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(self.rates, self.losses, color="0.75", linewidth=1, label="loss")
        axes.plot(self.rates, self.smoothed, color="C0", linewidth=2, label="smoothed")
        place = self._steepest()
        if place is not None:
            rate = self.rates[place]
            axes.plot(rate, self.smoothed[place], "o", color="C3", label=f"suggested: {rate:.2g}")
        axes.set_xscale("log")
        low, high = self._shown_losses()
        axes.set_ylim(low, high)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return axes

    def _shown_losses(self) -> tuple[float, float]:
        """Bounds for the picture: a last loss that explodes would flatten all others."""
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        low = min(finite, default=0.0)
        begin = max(finite[: SKIPPED + 1], default=1.0)
        margin = 0.1 * (begin - low) or 0.1 * abs(low) or 0.1
        return low - 2 * margin, begin + 5 * margin

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
    with untouched(model):
        model.fit(
            x,
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            steps_per_epoch=num_training * model.compilation.accumulate_grad_batches,
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
