"""What `compare` and `search` are both given."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fitkit.arguments import check_choice, check_count, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.text_files import checked_path
from fitkit.extras.trials.pool import places
from fitkit.extras.trials.runs import Build, Training, check_alone
from fitkit.model import Model
from fitkit.registry import did_you_mean
from fitkit.seams.callbacks import Monitor

OWN = ("self", "x", "y", "verbose", "resume_from")
"""Arguments of fit that runs have otherwise."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """What all runs have in common, checked.

    Attributes:
        work: what makes one of them.
        mode: which value is better, `"min"` or `"max"`.
        places: the environment of each that runs at the same time.
        threads: that each computes with.
        folder: where they are kept; None: nowhere.
        about: by what a file of them is known.
        shows: whether to print.
    """

    work: Training
    mode: str
    places: list[dict[str, str]]
    threads: int
    folder: Path | None
    about: dict[str, Any]
    shows: bool


def checked_runs(
    verb: str,
    builders: Mapping[str, Build],
    x: Any,
    y: Any,
    fit_arguments: Mapping[str, Any],
    *,
    metric: str,
    mode: str,
    take: str,
    workers: object,
    threads: object,
    folder: str | os.PathLike[str] | None,
    verbose: object,
    reports: bool = False,
) -> Runs:
    """Check what runs are given.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid, or a launcher has started
            this process.
    """
    check_alone(f"tune.{verb}")
    mode = Monitor(metric, mode).mode
    take = check_choice("take", take, ("last", "best"))
    threads = check_count("threads", threads)
    check_choice("verbose", verbose, ("auto", 0, 1))
    known = [name for name in inspect.signature(Model.fit).parameters if name not in OWN]
    for name in fit_arguments:
        if name not in known:
            raise ArgumentTypeError(
                f"{verb}() has no argument {name!r}, and fit has none that can be given here."
                f"{did_you_mean(name, known)} Of fit it takes: {', '.join(known)}."
            )
    data = {"x": x, "y": y, **fit_arguments}
    for name, value in data.items():
        if isinstance(value, Iterator):
            raise ConfigurationError(
                f"{name} is a {type(value).__name__}, which can be read only once, and each run "
                "reads it. Give arrays, a Dataset or a DataLoader."
            )
    path = None if folder is None else Path(checked_path(folder, "folder")).absolute()
    if "%" in str(path):
        raise ConfigurationError(
            f"folder={str(folder)!r} has a %. Name the folder as it is: a later call with this "
            "name finds the runs there."
        )
    plain = {
        name: value
        for name, value in sorted(fit_arguments.items())
        if isinstance(value, (bool, int, float, str))
    }
    best: Callable[..., float] | None = None
    if take == "best":
        best = min if mode == "min" else max
    return Runs(
        work=Training(builders, data, metric, best, None if path is None else str(path), reports),
        mode=mode,
        places=places(workers, threads),
        threads=threads,
        folder=path,
        about={"verb": verb, "metric": metric, "mode": mode, "take": take, "fit": plain},
        shows=verbose != 0,
    )


def check_builder(name: object, build: object) -> None:
    """Refuse what can't be called to build a model.

    Raises:
        ArgumentTypeError: with what was given.
    """
    if isinstance(build, Model) or not callable(build):
        raise ArgumentTypeError(
            f"{name}={describe(build)} must be a function that returns a new, compiled model: "
            "each run needs one of its own."
        )


def known_value(record: Mapping[str, Any]) -> float | None:
    """Return the value that a line of a file of runs has; None if it has none.

    Files can be edited: anything but a finite number counts as none.
    """
    value = record.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
