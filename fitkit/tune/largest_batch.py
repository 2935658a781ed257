"""The largest batch that fits into memory, found by trying."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils.data import DataLoader

from fitkit.arguments import check_choice, check_count
from fitkit.data.sources import check_data_type, make_source
from fitkit.errors import MEMORY_ERRORS, ConfigurationError, WorkerError, is_out_of_memory
from fitkit.model import Model
from fitkit.modes import in_use
from fitkit.tune.untouched import untouched


def batch_size(
    model: Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    mode: str = "power",
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

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be; even the first size is
            too large; or x makes its own batches.
    """
    check_choice("mode", mode, ("power", "binsearch"))
    check_count("steps_per_trial", steps_per_trial)
    check_count("init_val", init_val)
    check_count("max_trials", max_trials)
    check_count("max_val", max_val, optional=True)
    bound = _samples(x, y) // model._fitkit.compilation.strategy.share_count
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
