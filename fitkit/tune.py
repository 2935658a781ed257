"""Finding a learning rate or a batch size by trying; the model is left as it was.

Reference: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, arXiv:1506.01186.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.ranks import from_all_ranks
from fitkit.callbacks.rates import set_rate, updates_of
from fitkit.callbacks.watches import BatchLosses
from fitkit.data.sources import check_data_type, make_source
from fitkit.errors import MEMORY_ERRORS, ConfigurationError, WorkerError, is_out_of_memory
from fitkit.model import Model
from fitkit.modes import in_use
from fitkit.pictures.curves import rate_curve
from fitkit.training.settings import parts_of_update
from fitkit.typing import Arrays, Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RateRange", "batch_size", "learning_rate"]

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

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> found = fitkit.tune.learning_rate(model, x, x.sum(1))
        >>> model.compile(learning_rate=found.suggestion)
    """

    def __init__(self, rates: list[float], losses: list[float]) -> None:
        self.rates = rates
        self.losses = losses
        self.smoothed: list[float] = smoothed(losses)

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
    x: Data,
    y: Arrays | None = None,
    *,
    batch_size: int = 32,
    sample_weight: Arrays | None = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: Literal["exponential", "linear"] = "exponential",
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
    compilation = model._fitkit.compilation
    effective, parts = compilation.effective_batch_size, compilation.accumulate_grad_batches
    if effective is not None:
        ranks, is_loader = compilation.strategy.data_rank_count, isinstance(x, DataLoader)
        size = x.batch_size if isinstance(x, DataLoader) else batch_size
        parts = parts_of_update(effective, ranks, size, is_fixed=is_loader)
        batch_size = batch_size if is_loader else effective // ranks // parts
    with in_use(model, "tune.learning_rate", alone=True), untouched(model):
        given = {**model._fitkit.compilation.given, "accumulate_grad_batches": parts}
        model._fitkit.compilation = dataclasses.replace(model._fitkit.compilation, given=given)
        model.fit(
            x,
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            steps_per_epoch=num_training * parts,
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


def batch_size(
    model: Model,
    x: Data,
    y: Arrays | None = None,
    *,
    sample_weight: Arrays | None = None,
    mode: Literal["power", "binsearch"] = "power",
    steps_per_trial: int = 3,
    init_val: int = 2,
    max_trials: int = 25,
    max_val: int | None = None,
) -> int:
    """The largest batch size with which a compiled model trains without running out of memory.

    Each trial trains for some steps; afterwards the model has its weights, optimizer and random
    numbers back. Leave some room: other programs, longer sequences and validations need memory,
    too. On the CPU a machine may come to a standstill before it says that memory is short; give
    `max_val` there.

    Args:
        model: a compiled model; its devices and precision are those of the trials.
        x, y, sample_weight: as in `fit`; arrays or a Dataset, whose batches fit makes.
        mode: `"power"` (default) doubles the size until memory runs out; `"binsearch"` then
            halves the gap, to the sample.
        steps_per_trial: steps with each size. Default 3.
        init_val: the first size. Default 2.
        max_trials: the most trials. Default 25.
        max_val: the largest size to try; default, and at most, the samples of a rank.

    Returns:
        The size, for each process, as `fit` takes it.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> fitkit.tune.batch_size(model, x, x.sum(1), max_val=64)
        64

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be; even the first size is
            too large; or x makes its own batches.
    """
    check_choice("mode", mode, ("power", "binsearch"))
    check_count("steps_per_trial", steps_per_trial)
    check_count("init_val", init_val)
    check_count("max_trials", max_trials)
    check_count("max_val", max_val, optional=True)
    bound = _samples(x, y) // model._fitkit.compilation.strategy.data_rank_count
    bound = bound if max_val is None else min(bound, max_val)
    if init_val > bound:
        raise ConfigurationError(f"init_val={init_val} is more than the {bound} that can be tried.")

    def fits(size: int) -> bool:
        return _trains(model, x, y, sample_weight, size, steps_per_trial)

    with in_use(model, "tune.batch_size", alone=True), untouched(model):
        return search(fits, mode, init_val, bound, max_trials)


def search(fits: Any, mode: str, first: int, bound: int, trials: int) -> int:
    """The largest size for which `fits(size)` is true, if it is so for all smaller ones.

    Raises:
        ConfigurationError: it isn't for the first.
    """
    good, bad = 0, bound + 1
    size = first
    for _ in range(trials):
        if fits(size):
            good = size
        else:
            bad = size
        if good == 0:
            raise ConfigurationError(f"Even batch_size={first} needs more memory than there is.")
        is_doubling = bad == bound + 1
        if good == bound or (mode == "power" and (not is_doubling or 2 * good > bound)):
            break
        if bad - good <= 1:
            break
        size = min(2 * good, bound) if is_doubling else (good + bad) // 2
    return good


def _samples(x: Any, y: Any) -> int:
    check_data_type(x)
    source = make_source(x, y)
    if isinstance(x, DataLoader) or source.samples is None:
        raise ConfigurationError(
            f"x is a {type(x).__name__}, which makes its own batches. Give arrays or the Dataset."
        )
    return source.samples


def _trains(model: Model, x: Any, y: Any, sample_weight: Any, size: int, steps: int) -> bool:
    """Whether some steps with that batch size work."""
    try:
        model.fit(
            x, y, sample_weight=sample_weight, batch_size=size, steps_per_epoch=steps, verbose=0
        )
        return True
    except Exception as error:
        if not is_short_of_memory(error):
            raise
    finally:
        # The error's frames held the step's tensors until here.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return False


def is_short_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, here or on another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or is_out_of_memory(seen):
            return True
        if isinstance(seen, WorkerError) and MEMORY_ERRORS.search(seen.remote_traceback):
            return True
        seen = seen.__cause__
    return False


NOTES = ("history", "stop_training", "current_epoch", "_batch_size", "_log_names")
"""What a fit leaves on a model beside its weights."""

WITHOUT = dict.fromkeys(("warmup_epochs", "scale_lr", "lr_scheduler", "effective_batch_size"))
"""Arguments of compile that would change rates or batches while something is tried."""


@contextlib.contextmanager
def untouched(model: Model) -> Iterator[None]:
    """Put weights, optimizers, schedulers, notes and random numbers back at the end.

    Meanwhile nothing changes the learning rates by itself. The model, its parameters and its
    optimizers stay the same objects.
    """
    compilation, state = model._fitkit.compilation, model._fitkit.fit_state
    weights = [(tensor, _copied(tensor)) for tensor in _tensors(model)]
    notes = {name: vars(model)[name] for name in NOTES if name in vars(model)}
    had = dict(vars(state))
    optimizers = [(optimizer, _content(optimizer)) for optimizer in state.optimizers]
    numbers = random.getstate(), np.random.get_state()
    model._fitkit.compilation = dataclasses.replace(
        compilation, given={**compilation.given, **WITHOUT}, scheduler=None
    )
    state.schedulers = []
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model._fitkit.compilation = compilation
        vars(state).update(had)
        for optimizer, content in optimizers:
            _put_content(optimizer, content)
        _put_back(weights)
        for name in NOTES:
            vars(model).pop(name, None)
        vars(model).update(notes)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])


def _tensors(model: Model) -> list[torch.Tensor]:
    """All that a training changes in place."""
    return [*model.parameters(), *model.buffers(), *model._fitkit.compilation.loss_parameters()]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # In main memory: a copy on the device would leave less of it for what is tried.
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _put_back(weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, before in weights:
        tensor.copy_(before)


def _content(optimizer: Optimizer) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """An optimizer's state and its groups' options, copied."""
    state = {parameter: copy.deepcopy(own) for parameter, own in optimizer.state.items()}
    options = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    return state, copy.deepcopy(options)


def _put_content(
    optimizer: Optimizer, content: tuple[dict[Any, Any], list[dict[str, Any]]]
) -> None:
    state, options = content
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for name in set(group) - set(before) - {"params"}:
            del group[name]
        group.update(before)
