"""`fitkit.verify`, and verifying a script at its first `fit`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.data_on_ranks.sharding import keeps_rows
from fitkit.extras.verification.augmentation import augmentation_row
from fitkit.extras.verification.cutting import SEED, Kept, same_bits
from fitkit.extras.verification.device import device_row
from fitkit.extras.verification.results import Cause, Row, Verification
from fitkit.extras.verification.trials import Trials
from fitkit.model import Model
from fitkit.modes import in_use
from fitkit.printing import say
from fitkit.random_states import kept_random_numbers, set_seed
from fitkit.seams.data import LoaderSource, NoRows, Source, check_data_type, make_source
from fitkit.seams.machines import detect


def verify(
    model: Model,
    x: Any,
    y: Any = None,
    *,
    devices: int = 2,
    batch_size: int = 32,
    updates: int = 3,
    sample_weight: Any = None,
    class_weight: Any = None,
    jit_compile: bool | None = None,
    against: str | None = None,
    verbose: bool = True,
) -> Verification:
    """Check that a net and its data give the same numbers however the batches are cut.

    A copy of the model makes a few updates in one process, with whole batches and in float64. Other
    copies make the same updates in other ways: accumulated from parts, on several processes,
    resumed from a checkpoint, and in the compiled precision. They also evaluate smaller batches. If
    numbers differ, further runs find out why: with a kind of layer in evaluation mode, with other
    labels, with deterministic kernels. Afterwards the model, the random numbers and the files are
    as before.

    Callbacks aren't called. Schedulers and warmup take part in the resumed run only.

    Args:
        model: a compiled model.
        x, y, sample_weight, class_weight: as in `fit`. The data must be readable more than once.
        devices: the number of processes. Default 2.
        batch_size: samples per update, for arrays or a Dataset. Default 32.
        updates: the number of updates. Default 3.
        jit_compile: whether to run the net with `torch.compile`, too, which may take minutes.
            Default None: if the model is compiled with it.
        against: `"cpu"` compares the model's device with the CPU, too, in float64 where the device
            has it: each module's outputs and gradients, from the inputs that it had on the device,
            so that the row `"device"` names the first module that computes something else. Default
            None.
        verbose: whether to print the table. Default True.

    Returns:
        The rows, with `.ok`, `.causes` and `.table`.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.
        Exception: the model can't train on these data. The error is the one from `fit`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> found = fitkit.verify(model, x, x.sum(1, keepdim=True), devices=1, verbose=False)
        >>> found.ok, found["accumulated"].digits > 9
        (True, True)
    """
    if not isinstance(model, Model):
        raise ArgumentTypeError(
            f"model={describe(model)} must be a compiled fitkit.Model. Write fitkit.Model(net)."
        )
    devices = check_count("devices", devices)
    updates = check_count("updates", updates)
    batch_size = check_count("batch_size", batch_size)
    verbose = check_flag("verbose", verbose)
    jit_compile = check_flag("jit_compile", jit_compile, optional=True)
    if against is not None:
        check_choice("against", against, ("cpu",))
    check_data_type(x)
    compilation = model._fitkit.compilation
    if detect() is not None or compilation.strategy.collectives.world_size > 1:
        raise ConfigurationError(
            "verify starts its own processes, but this process is already one of several. Run "
            "it alone: python script.py."
        )
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigurationError(
            "The net has lazy layers whose shapes aren't known yet. Run one batch through it "
            "first: model.predict_on_batch(x[:1])."
        )
    dtype = compilation.strategy.precision.input_dtype(model)
    source = make_source(
        x, y, sample_weight, batch_size=batch_size, shuffle=True, float_dtype=dtype
    )
    if not source.repeatable:
        raise ConfigurationError(
            f"x is a {type(x).__name__}, which can be read only once, so that fit would find it "
            "used up. Give arrays, a Dataset or a DataLoader."
        )
    runs_compiled = bool(compilation.given.jit_compile) if jit_compile is None else jit_compile
    kept = kept_random_numbers(source.generators)
    # A warning in each of the runs would be a row here.
    with kept, in_use(model, "verify", alone=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source, keeping = _keeping(source)
        batches, own_samples = _read(source, updates, keeping)
        data = _same_twice(source, batches)
        augmentation = augmentation_row(source)
        trials = Trials(model, batches, devices, class_weight, own_samples)
        rows = (data, augmentation, *trials.rows(runs_compiled))
        if against is not None:
            rows = (*rows, device_row(trials))
    size = trials.size_of(trials.batches[0]) or "?"
    found = Verification(
        rows,
        f"{len(trials.batches)} updates of {size} samples, compared in float"
        f"{trials.precision[:2]} with whole batches in one process",
    )
    if verbose:
        say(found)
    return found


class _Keeping:
    """A loader's collate_fn that keeps the samples of the last batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self.last: Kept | None = None

    def __call__(self, samples: list[Any]) -> Any:
        self.last = Kept(copy.deepcopy(samples), self.collate)
        return self.collate(samples)


def _keeping(source: Source) -> tuple[Source, _Keeping | None]:
    """Return the source, and what keeps its samples where a collate_fn of the user's joins them."""
    loader = source.loader if isinstance(source, LoaderSource) else None
    if loader is None or keeps_rows(loader) or loader.batch_sampler is None:
        return source, None
    other, keeping = copy.copy(loader), _Keeping(loader.collate_fn)
    # Here, as the samples must be kept in this process. A loader refuses these as attributes.
    own = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    vars(other).update(own, collate_fn=keeping)
    return LoaderSource(other), keeping


def _read(
    source: Source, count: int, keeping: _Keeping | None = None
) -> tuple[list[Any], list[Kept | None]]:
    """Read the first batches with rows, after seeding everything that the data may draw from."""
    set_seed(SEED)
    for generator in source.generators:
        generator.manual_seed(SEED)
    if hasattr(source, "seed"):
        source.seed = None  # for the order of arrays, which is then drawn again
    found: list[Any] = []
    kept: list[Kept | None] = []
    for batch in source.batches(0):
        if batch is not NoRows:  # a Dataset may return the same memory again
            found.append(trees.map_leaves(copy.deepcopy, batch))
            kept.append(None if keeping is None else keeping.last)
        if len(found) == count:
            break
    if not found:
        raise ConfigurationError("x is empty: it gave no batches.")
    return found, kept


def _same_twice(source: Source, batches: list[Any]) -> Row:
    """Whether the data are the same if they are read again with the same seeds."""
    what = "the data, read twice"
    again, _ = _read(source, len(batches))
    for number, (one, other) in enumerate(zip(batches, again, strict=False)):
        pairs = zip(trees.leaves_with_paths(one), trees.leaves_with_paths(other), strict=False)
        for (path, mine), (_, others) in pairs:
            if not same_bits(mine, others):
                cause = Cause(
                    "data",
                    f"x, at {path or 'its samples'},",
                    "gives other samples when it is read again with the same seeds.",
                    "Draw from torch's, NumPy's or Python's global generator, or from one that is "
                    "seeded with the sample's index. Else a resumed training sees other data.",
                )
                return Row("data", what, False, 0.0, f"batch {number}", (cause,))
    return Row("data", what, True, math.inf)


class _Verified(BaseException):
    """Ends a script at its first `fit`. The script's own `except Exception` doesn't catch it."""


def verify_script(path: str, arguments: Sequence[str] = (), **options: Any) -> Verification:
    """Run a script until its first call of `fit`, and verify that model with those data instead.

    Args:
        path: the script. It runs as with `python path`.
        arguments: the script's own arguments.
        options: options of `verify`. The rest comes from the call of `fit`.

    Raises:
        ConfigurationError: the script ended without a call of `fit`.
        Exception: whatever the script raises.
    """
    import runpy

    found: list[Verification] = []
    fit, kept = Model.fit, (sys.argv, sys.path[:])

    def stand_in(*given: Any, **named: Any) -> None:
        Model.fit = fit  # type: ignore[method-assign] # for the copies
        call = inspect.signature(fit).bind(*given, **named)
        call.apply_defaults()
        names = ("y", "batch_size", "sample_weight", "class_weight")
        used = {name: call.arguments[name] for name in names}
        found.append(verify(call.arguments["self"], call.arguments["x"], **used, **options))
        raise _Verified

    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    Model.fit = stand_in  # type: ignore[method-assign, assignment]
    try:
        with contextlib.suppress(_Verified, SystemExit):  # even sys.exit(0) says nothing of fit
            runpy.run_path(path, run_name="__main__")
    finally:
        Model.fit = fit  # type: ignore[method-assign]
        sys.argv, sys.path[:] = kept
    if not found:
        raise ConfigurationError(
            f"{path} ended without a call of fit. Give a script that compiles a model and fits it."
        )
    return found[0]
