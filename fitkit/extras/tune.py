"""Find a learning rate or a batch size by short trials. The model stays as it was.

Reference: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, arXiv:1506.01186.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader

from fitkit.accelerators import empty_cache
from fitkit.arguments import check_choice, check_count, check_number
from fitkit.buffers import extra_states, restorer
from fitkit.errors import MEMORY_ERRORS, ConfigurationError, WorkerError, is_out_of_memory
from fitkit.extras.pictures.curves import rate_curve
from fitkit.extras.rate_callbacks import set_rate
from fitkit.extras.watches import BatchLosses
from fitkit.model import Model
from fitkit.modes import in_use
from fitkit.outputs import EMPTY_MEAN
from fitkit.random_states import kept_random_numbers
from fitkit.seams.callbacks import Callback, Logs, from_all_ranks
from fitkit.seams.data import check_data_type, make_source
from fitkit.seams.networks import verb_of
from fitkit.seams.steps import parts_of_update
from fitkit.typing import Arrays, Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SMOOTHING = 0.9
"""The weight of the old mean in the running mean of losses that detects divergence."""

WINDOW = 0.04
"""The width of the smoothing window to each side, as a fraction of all updates."""

SKIPPED = 5
"""The number of first updates that make no suggestion."""


class RateRange:
    """The losses at rising learning rates.

    Attributes:
        rates: the rising rates, one per update.
        losses: the mean loss of each update's batches, before the update.
        smoothed: the losses averaged over a window to both sides, with triangular weights. (A
            running mean would lag behind and make the suggestion too high.)
        suggestion: the rate at which the smoothed losses fall most steeply against the rate's
            logarithm, before the lowest loss. None if they never fall.

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
        """The rate to train with; None if the losses never fall."""
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
        """Return the index of the lowest loss. After it the training diverges."""
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
        """Draw the losses over the rates, and mark the suggestion.

        Args:
            figure: a matplotlib Figure to draw in. None makes a new one that pyplot doesn't
                manage, as `history.plot()` does.
            axes: instead of a figure, the Axes to draw in.
            size: width and height of the new figure in inches.
            path: a file to write as well: `.png`, `.svg`, `.pdf`, ….

        Returns:
            The figure, which a notebook shows.

        Raises:
            MissingPackageError: matplotlib isn't installed (`pip install 'torch-fitkit[plot]'`).
            ArgumentTypeError: `figure`, `axes` or `path` has a wrong type.
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
    """Try rising learning rates on a compiled model, and suggest one.

    The model trains for some updates. Then its weights, optimizer and random numbers are restored.
    Schedulers and warmup have no effect here. Several parameter groups keep the ratios of their
    rates.

    Args:
        model: a compiled model. It trains on its compiled devices.
        x, y, batch_size, sample_weight: as in `fit`. The data must be readable more than once.
        min_lr: the first rate. Default 1e-8.
        max_lr: the last rate. Default 1.
        num_training: the number of updates. Default 100.
        mode: whether the rate rises by a constant factor (`"exponential"`, default) or by a
            constant difference (`"linear"`).
        early_stop_threshold: stop if the smoothed loss is above this many times the lowest so far.
            Default 4. None never stops early.

    Returns:
        The rates and losses, with `.suggestion` and `.plot()`.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> x = torch.randn(64, 2)
        >>> found = fitkit.tune.learning_rate(model, x, x.sum(1, keepdim=True))
        >>> model.compile(learning_rate=found.suggestion)
    """
    min_lr = check_number("min_lr", min_lr, above=0)
    max_lr = check_number("max_lr", max_lr, above=min_lr)
    num_training = check_count("num_training", num_training, minimum=SKIPPED + 3)
    mode = check_choice("mode", mode, ("exponential", "linear"))
    early_stop_threshold = check_number(
        "early_stop_threshold", early_stop_threshold, above=1, optional=True
    )
    if isinstance(x, Iterator):
        raise ConfigurationError(
            f"x is a {type(x).__name__}, which can be read only once, so that fit would find it "
            "used up. Give arrays, a Dataset or a DataLoader."
        )
    rates = [
        _rate(mode, min_lr, max_lr, place / (num_training - 1)) for place in range(num_training)
    ]
    rising = _RisingRates(rates, early_stop_threshold)
    compilation = model._fitkit.compilation
    effective = compilation.given.effective_batch_size
    parts = compilation.given.accumulate_grad_batches
    if effective is not None:
        ranks, is_loader = compilation.strategy.data_rank_count, isinstance(x, DataLoader)
        size = x.batch_size if isinstance(x, DataLoader) else batch_size
        parts = parts_of_update(effective, ranks, size, is_fixed=is_loader)
        batch_size = batch_size if is_loader else effective // ranks // parts
    with in_use(model, "tune.learning_rate", alone=True), untouched(model):
        trial = model._fitkit.compilation
        given = dataclasses.replace(trial.given, accumulate_grad_batches=parts)
        model._fitkit.compilation = dataclasses.replace(trial, given=given).on(trial.strategy)
        verb_of(model, "fit")(
            x,
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            steps_per_epoch=num_training * parts,
            callbacks=rising,
            verbose=0,
        )
    return RateRange(rates[: len(rising.losses)], rising.losses)


def _rate(mode: str, low: float, high: float, part: float) -> float:
    return low * (high / low) ** part if mode == "exponential" else low + (high - low) * part


class _RisingRates(Callback):
    """Sets the rate of each update, and records the loss before it."""

    stops_alike = True
    each_batch = True

    def __init__(self, rates: list[float], threshold: float | None) -> None:
        self.rates = rates
        self.threshold = threshold
        self.losses: list[float] = []
        self._batch_losses = BatchLosses()
        self._begun = 0
        self._lowest = math.inf

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begun = self.model.global_step

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        set_rate(self.model, self.rates[min(len(self.losses), len(self.rates) - 1)])

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._batch_losses.add(batch, logs)
        if self.model.global_step - self._begun == len(self.losses):
            return  # gradients are being accumulated
        mine = [loss for _, loss in self._batch_losses.take() if loss is not EMPTY_MEAN]
        everyones = [loss for losses in from_all_ranks(self.model, mine) for loss in losses]
        if not everyones:
            return
        loss = sum(everyones) / len(everyones)
        self.losses.append(loss)
        current = running_mean(self.losses)
        self._lowest = min(self._lowest, current)
        too_high = self.threshold is not None and current > self.threshold * abs(self._lowest)
        if not math.isfinite(loss) or (too_high and len(self.losses) > SKIPPED):
            self.model.stop_training = True


def running_mean(losses: list[float]) -> float:
    """Return the running mean of losses, in which later ones weigh more."""
    mean = 0.0
    for loss in losses:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
    return mean / (1 - SMOOTHING ** len(losses))


def smoothed(losses: list[float]) -> list[float]:
    """Return the means of the losses over a window around each."""
    reach = max(2, round(WINDOW * len(losses)))
    weights = [reach + 1 - abs(offset) for offset in range(-reach, reach + 1)]
    found = []
    for place in range(len(losses)):
        # The same width on both sides, or the ends would lean towards the middle.
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
    """Find the largest batch size with which a compiled model trains without running out of memory.

    Each trial trains for some steps. Then the model's weights, optimizer and random numbers are
    restored. Leave some room: other programs, longer sequences and validations need memory, too.
    Or write `compile(out_of_memory="split")`, which computes the batches in parts that don't fit.
    The trials compute them whole.

    On the CPU, pass `max_val`: a machine may come to a standstill before it reports that memory is
    short.

    Args:
        model: a compiled model. The trials use its devices and precision.
        x, y, sample_weight: as in `fit`. Pass arrays or a Dataset, from which `fit` makes batches.
        mode: `"power"` (default) doubles the size until memory runs out. `"binsearch"` then
            searches the gap, down to one sample.
        steps_per_trial: the number of steps with each size. Default 3.
        init_val: the first size. Default 2.
        max_trials: the most trials. Default 25.
        max_val: the largest size to try. The default and the upper limit are a rank's samples.

    Returns:
        The batch size for each process, as `fit` takes it.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> fitkit.tune.batch_size(model, x, x.sum(1), max_val=64)
        64

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid, even the first size is too
            large, or x makes its own batches.
    """
    mode = check_choice("mode", mode, ("power", "binsearch"))
    steps_per_trial = check_count("steps_per_trial", steps_per_trial)
    init_val = check_count("init_val", init_val)
    max_trials = check_count("max_trials", max_trials)
    max_val = check_count("max_val", max_val, optional=True)
    bound = _samples(x, y) // model._fitkit.compilation.strategy.data_rank_count
    bound = bound if max_val is None else min(bound, max_val)
    if init_val > bound:
        raise ConfigurationError(f"init_val={init_val} is more than the {bound} that can be tried.")

    def fits(size: int) -> bool:
        return _trains(model, x, y, sample_weight, size, steps_per_trial)

    with in_use(model, "tune.batch_size", alone=True), untouched(model):
        return search(fits, mode, init_val, bound, max_trials)


def search(fits: Any, mode: str, first: int, bound: int, trials: int) -> int:
    """Return the largest size for which `fits(size)` is true, if it is true for all smaller ones.

    Raises:
        ConfigurationError: it isn't true for the first.
    """
    good, bad = 0, bound + 1
    size = first
    for _ in range(trials):
        if fits(size):
            good = size
        else:
            bad = size
        if good == 0:
            raise ConfigurationError(
                f"Even batch_size={first} needs more memory than there is. Write "
                "compile(out_of_memory='split') to compute them in parts, or give init_val=1."
                if first > 1
                else "Even batch_size=1 needs more memory than there is."
            )
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
    """Whether some steps with that batch size succeed."""
    try:
        verb_of(model, "fit")(
            x, y, sample_weight=sample_weight, batch_size=size, steps_per_epoch=steps, verbose=0
        )
        return True
    except Exception as error:
        if not is_short_of_memory(error):
            raise
    finally:
        # Until here the error's frames kept the step's tensors alive.
        gc.collect()
        empty_cache(model.device)
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


NOTES = ("history", "stop_training", "current_epoch")
"""The attributes that a fit leaves on a model, besides its weights."""

RECORDED = ("compilation", "batch_size", "log_names")
"""What a fit, or a trial, changes in the model's `Record`."""


@contextlib.contextmanager
def untouched(model: Model) -> Iterator[None]:
    """Restore weights, optimizers, schedulers, records and random numbers at the end.

    Within the block nothing changes the learning rates by itself. The model, its parameters and
    its optimizers stay the same objects.
    """
    record, state, compilation = model._fitkit, model._fitkit.fit_state, model._fitkit.compilation
    trained = compilation.trained(model)
    # In main memory: copies on the device would leave less room for the trial.
    restore_weights = restorer(trained.places(), "cpu")
    modules = (model, *trained.beside.values())
    extra = [found for module in modules for found in extra_states(module)]
    notes = {name: vars(model)[name] for name in NOTES if name in vars(model)}
    recorded = {name: getattr(record, name) for name in RECORDED}
    restore_state = state.restorer()
    states = [
        (optimizer, {parameter: copy.deepcopy(own) for parameter, own in optimizer.state.items()})
        for optimizer in state.optimizers
    ]
    # Without what would change rates or batches during a trial.
    given = dataclasses.replace(
        compilation.given,
        warmup_epochs=None,
        scale_lr=None,
        lr_scheduler=None,
        effective_batch_size=None,
        out_of_memory="raise",  # what a batch needs shows only where it is computed whole
    )
    record.compilation = dataclasses.replace(compilation, given=given, scheduler=None).on(
        compilation.strategy
    )
    state.schedulers = []
    try:
        with kept_random_numbers(devices=[*{model.device, compilation.strategy.device}]):
            yield
    finally:
        vars(record).update(recorded)
        restore_state()
        for optimizer, own in states:
            optimizer.state.clear()
            optimizer.state.update(own)
        restore_weights()
        for part, before in extra:
            part.set_extra_state(before)
        for name in NOTES:
            vars(model).pop(name, None)
        vars(model).update(notes)
