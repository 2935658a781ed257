"""Whether one of several models is better, or was lucky."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fitkit.arguments import check_count, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.pictures.run_values import run_values
from fitkit.extras.text_files import as_json
from fitkit.extras.trials.arguments import Runs, check_builder, checked_runs, known_value
from fitkit.extras.trials.pool import Job, outcomes
from fitkit.extras.trials.runs import Notes
from fitkit.extras.trials.sequential import first_look, interval
from fitkit.printing import say
from fitkit.typing import Arrays, Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIVEN_UP = 3
"""After so many failed runs, and none that didn't fail, a candidate has no more."""

Verdict = Literal["better", "worse", "no difference", "not settled"]


@dataclasses.dataclass(frozen=True)
class FailedRun:
    """A run that has no value.

    Attributes:
        name: the candidate's.
        seed: the run's.
        error: why, in a line.
        trace: the traceback, or the last words of its process.
    """

    name: str
    seed: int
    error: str
    trace: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One candidate against the first.

    Attributes:
        name: the candidate's.
        difference: the mean of its values minus the first's, over the seeds that both have. NaN if
            there are none.
        interval: low and high; infinite while there are too few seeds.
        seeds: over how many seeds.
        verdict: `"better"` or `"worse"` than the first, `"no difference"` that is worth
            `practical`, or `"not settled"`.
    """

    name: str
    difference: float
    interval: tuple[float, float]
    seeds: int
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found. Its text is the verdict.

    Attributes:
        runs: the values of each candidate, one for each of `seeds`; None where a run failed, or
            where the candidate's own comparison was over.
        pairs: each other candidate against the first, by name.
        seeds: the seeds that were looked at, in order.
        failures: the runs that failed.
        metric, mode: the value, and whether `"min"` or `"max"` is better.
        level: how often the intervals and the verdict are right.
        practical: the difference that matters; None: any.
        interrupted: whether Ctrl-C ended it.

    Example:
        >>> from fitkit.tune import Comparison
        >>> found = Comparison({"a": [0.1, 0.2], "b": [0.2, 0.2]}, {}, [0, 1], metric="accuracy")
        >>> found.better, str(found)
        (None, 'not settled after 2 seeds')
    """

    runs: dict[str, list[float | None]]
    pairs: dict[str, Pair]
    seeds: list[int]
    failures: list[FailedRun] = dataclasses.field(default_factory=list)
    metric: str = "val_loss"
    mode: str = "max"
    level: float = 0.95
    practical: float | None = None
    interrupted: bool = False

    @property
    def better(self) -> str | None:
        """The name of the candidate that is better; None if none is known to be.

        Of several that are better than the first, the one with the largest difference. The first,
        if all others are worse.
        """
        leading = self._leading
        if leading is None:
            return None
        if leading.verdict == "better":
            return leading.name
        if all(pair.verdict == "worse" for pair in self.pairs.values()):
            return next(iter(self.runs))
        return None

    @property
    def difference(self) -> float:
        """The mean difference of the leading candidate minus the first. NaN without a pair."""
        return math.nan if self._leading is None else self._leading.difference

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of that difference: low and high."""
        return (-math.inf, math.inf) if self._leading is None else self._leading.interval

    @property
    def _leading(self) -> Pair | None:
        """The pair that is told of: the best that is better than the first, or else the best."""
        sign = 1 if self.mode == "max" else -1
        return max(
            self.pairs.values(),
            key=lambda pair: (
                pair.verdict == "better",
                -math.inf if math.isnan(pair.difference) else sign * pair.difference,
            ),
            default=None,
        )

    @property
    def _in_points(self) -> bool:
        """Whether values are parts of one, which people tell in percent."""
        known = [value for values in self.runs.values() for value in values if value is not None]
        return self.mode == "max" and all(0 <= value <= 1 for value in known)

    def _size(self, difference: float) -> str:
        return f"{100 * difference:.2g}" if self._in_points else f"{difference:.2g}"

    def __str__(self) -> str:
        points = " points" if self._in_points else ""
        seeds, leading = len(self.seeds), self._leading
        better = self.better
        if leading is not None and better is not None:
            reach = (leading.interval[1] - leading.interval[0]) / 2
            text = (
                f"{better} is better by {self._size(abs(leading.difference))} ± "
                f"{self._size(reach)}{points} after {leading.seeds} seeds"
            )
        elif self.pairs and all(pair.verdict == "no difference" for pair in self.pairs.values()):
            assert self.practical is not None
            size = f"{self._size(self.practical)}{points}"
            text = f"no difference worth {size} after {seeds} seeds"
        else:
            text = f"not settled after {seeds} seeds"
        if self.interrupted:
            text += ", interrupted"
        for name in self.runs:
            failed = sum(one.name == name for one in self.failures)
            if failed:
                text += f"; {failed} {'run' if failed == 1 else 'runs'} of {name} failed"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data. What isn't finite is None, as JSON has it."""
        plain: dict[str, Any] = as_json(dataclasses.asdict(self) | {"text": str(self)})
        head = {"better": self.better, "difference": self.difference, "interval": self.interval}
        return {**as_json({**head, "interval": list(self.interval)}), **plain}

    def to_json(self) -> str:
        """Return the same as JSON, for a script to print."""
        return json.dumps(self.to_dict())

    def summary(self) -> None:
        """Print a table with a row and a bar for each candidate, and the verdict."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        first = next(iter(self.runs))
        for head in (
            "",
            self.metric,
            "",
            "runs",
            f"− {first}",
            f"{100 * self.level:.4g} % interval",
        ):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        means = {name: _mean(values) for name, values in self.runs.items()}
        finite = [v for values in self.runs.values() for v in values if v is not None]
        for name, values in self.runs.items():
            mean, pair = means[name], self.pairs.get(name)
            known = [value for value in values if value is not None]
            cells = ["", ""]
            if pair is not None and not math.isnan(pair.difference):
                low, high = pair.interval
                cells = [f"{pair.difference:+.3g}"]
                cells += [f"{low:+.2g} .. {high:+.2g}" if math.isfinite(low) else "too few seeds"]
            table.add_row(
                name, "–" if mean is None else f"{mean:.5g}", _bar(mean, finite),
                f"{len(known)}", *cells,
            )  # fmt: skip
        console = Console()
        console.print(table)
        console.print(str(self), markup=False, highlight=False)

    def plot(
        self,
        *,
        figure: Any = None,
        axes: Any = None,
        size: tuple[float, float] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draw the runs of each candidate, joined by seeds, and the interval of the difference.

        Args:
            figure, axes, size, path: as in `history.plot()`.

        Returns:
            The figure, which a notebook shows.

        Raises:
            MissingPackageError: matplotlib isn't installed (`pip install 'torch-fitkit[plot]'`).
            ArgumentTypeError: `figure`, `axes` or `path` has a wrong type.
        """
        return run_values(
            self.runs, self.metric, str(self), figure=figure, axes=axes, size=size, path=path
        )


BAR = 12
"""The characters of the longest bar."""


def _bar(mean: float | None, values: list[float]) -> str:
    """Return a bar from the least of all runs' values to a mean; the largest value's is full."""
    if mean is None:
        return ""
    low, high = min(values), max(values)
    return "█" * max(1, round(BAR * (mean - low) / (high - low))) if high > low else "█"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def compare(
    builders: Mapping[str, Callable[[], Any]],
    x: Data | None = None,
    y: Arrays | None = None,
    *,
    metric: str = "val_loss",
    mode: Literal["auto", "min", "max"] = "auto",
    seeds: int | Sequence[int] = 20,
    level: float = 0.95,
    practical: float | None = None,
    take: Literal["last", "best"] = "last",
    workers: int | Literal["auto"] = "auto",
    threads: int = 1,
    folder: str | os.PathLike[str] | None = None,
    verbose: Literal["auto", 0, 1] = "auto",
    **fit: Any,
) -> Comparison:
    """Train each of several models with several seeds, until it is known which one is better.

    Runs are paired: with a seed, all candidates get the same order of the data, the same
    augmentations, and the same initial weights where their nets have the same shapes. So the seeds'
    noise leaves their difference.

    After each seed the interval of the mean difference is looked at. The runs end when it leaves
    0, when all of it is within `practical`, or after `seeds`. The interval is made for so many
    looks: a look at each seed finds a difference where there is none in at most 1 - `level` of all
    comparisons, if two candidates with no difference have differences like Gaussian noise, or
    symmetric ones (as those of two equal candidates are). Several candidates share that error.

    Args:
        builders: at least two functions by name. Each builds a new net and returns a compiled
            model, or `(model, arguments)` with arguments of `fit` that it alone has, such as
            `{"batch_size": 64}`. The first is what the others are compared with. Let random
            numbers come from torch's, NumPy's or Python's global generators, which are seeded.
            (Keras draws the seeds of its layers in their order, so another layer changes the
            initial weights of those after it.)
        x, y: as in `fit`. The data must be readable more than once.
        metric: a name in the history of `fit`. Default `"val_loss"`.
        mode: `"min"`, `"max"` or `"auto"` (default), which follows the metric's name.
        seeds: the most seeds, from 0 on, or the seeds themselves, such as `range(1, 21)`. Default
            20. At least 6 for a level of 0.95.
        level: how often the verdict and the intervals are right. Default 0.95.
        practical: the difference that matters, in the metric's unit: 0.002 of an accuracy is 0.2
            points. Default None: any.
        take: whether a run's value is that of its `"last"` (default) or its `"best"` epoch.
        workers: how many runs at once. Default `"auto"`: one on each GPU, or without GPUs as many
            as the cores have room for. 1 runs in this process.
        threads: that each run computes with on the CPU. Default 1. Another number may change the
            last digits.
        folder: where `runs.jsonl` keeps each run's value, and each run is a `RunFolder`. A call
            with the same folder goes on from there. Default None: nowhere.
        verbose: 0 prints nothing. 1 or `"auto"` (default) prints a line for each seed, and a table.
        fit: arguments of `fit` for all runs: `epochs`, `batch_size`, `validation_data`, ….

    Returns:
        The comparison, with `better`, `difference`, `interval`, `runs`, `to_json()` and `plot()`.
        After Ctrl-C, with what is known so far.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid, all runs of all but one
            candidate failed, or the folder has other runs.

    Example:
        >>> import torch, fitkit
        >>> x = torch.randn(96, 4)
        >>> def build(rate):
        ...     model = fitkit.Model(torch.nn.Linear(4, 1))
        ...     model.compile("sgd", "mse", learning_rate=rate)
        ...     return model
        >>> candidates = {"slow": lambda: build(0.001), "fast": lambda: build(0.1)}
        >>> found = fitkit.tune.compare(
        ...     candidates, x, x.sum(1, keepdim=True), validation_split=0.25, workers=1, verbose=0
        ... )
        >>> found.better
        'fast'

    References:
        Wang and Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with
        unknown variance, 2023, arXiv:2310.03722. Jennison and Turnbull, Repeated confidence
        intervals for group sequential clinical trials, 1984.
    """
    if not isinstance(builders, Mapping) or not all(isinstance(name, str) for name in builders):
        raise ArgumentTypeError(
            f"builders={describe(builders)} must be a dict of functions by name, like "
            "{'now': build, 'wider': build_wider}."
        )
    if len(builders) < 2:
        raise ConfigurationError("builders must have at least two functions to compare.")
    for name, build in builders.items():
        check_builder(f"builders[{name!r}]", build)
        if folder is not None and (not re.fullmatch(r"[^%/\\:]+", name) or name[0] == "."):
            raise ConfigurationError(
                f"builders has {name!r}, which can't be a folder's name. Choose another name."
            )
    level = check_number("level", level, minimum=0.5, below=1)
    others = len(builders) - 1
    each = 1 - (1 - level) / others  # Bonferroni: the candidates share the error
    least = first_look(each)
    numbers = _checked_seeds(seeds)
    if len(numbers) < least:
        raise ConfigurationError(
            f"{len(numbers)} seeds can't settle anything: with fewer than {least}, luck alone "
            f"gives all differences one sign too often for level={level:g}. Give at least {least}."
        )
    practical = check_number("practical", practical, above=0, optional=True)
    runs = checked_runs(
        "compare", dict(builders), x, y, fit, metric=metric, mode=mode, take=take,
        workers=workers, threads=threads, folder=folder, verbose=verbose,
    )  # fmt: skip
    looks = _Looks(list(builders), runs, numbers, level, each, practical)
    with Notes(runs.folder, {**runs.about, "names": list(builders)}) as notes:
        for record in notes.known:
            looks.note(record.get("name"), record.get("seed"), known_value(record), record)
        interrupted = False
        trainings = outcomes(runs.work, looks.jobs(), runs.places, runs.threads, _no_answer)
        try:
            looks.look()
            for found in trainings:
                value = None if found.value is None else found.value["value"]
                job, what = found.job, {"error": found.error, "trace": found.trace}
                notes.add({"name": job["name"], "seed": job["seed"], "value": value, **what})
                looks.note(job["name"], job["seed"], value, what)
                looks.look()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            trainings.close()  # type: ignore[attr-defined]
    found_now = looks.comparison(interrupted=interrupted)
    looks.check_runs(interrupted)
    if runs.shows:
        found_now.summary()
    return found_now


def _checked_seeds(seeds: object) -> list[int]:
    """Return the seeds that were given, or so many from 0 on.

    Raises:
        ArgumentTypeError, ConfigurationError: they are no seeds, or one is there twice.
    """
    if isinstance(seeds, (list, tuple, range)):
        numbers = [check_count("seeds", seed, minimum=0) for seed in seeds]
        if len(set(numbers)) < len(numbers):
            raise ConfigurationError("seeds has a seed twice, whose runs would be the same.")
        return numbers
    return list(range(check_count("seeds", seeds)))


def _no_answer(job: Job, question: Any) -> None:
    return None


class _Looks:
    """What is known of the runs, and what they are still needed for.

    Seeds are looked at in their order, whichever run ends first: so the number of workers changes
    nothing, and quick runs don't count earlier than slow ones.
    """

    def __init__(
        self,
        names: list[str],
        runs: Runs,
        seeds: list[int],
        level: float,
        each: float,
        practical: float | None,
    ) -> None:
        self.names = names
        self.runs = runs
        self.level, self.each, self.practical = level, each, practical
        self.seeds = seeds
        self.seen = 0  # seeds that were looked at
        self.values: dict[tuple[str, int], float | None] = {}
        self.failures: dict[tuple[str, int], FailedRun] = {}
        self.taken: dict[str, list[float | None]] = {name: [] for name in names}
        self.differences: dict[str, list[float]] = {name: [] for name in names[1:]}
        self.verdicts: dict[str, Verdict] = dict.fromkeys(names[1:], "not settled")

    def note(self, name: Any, seed: Any, value: float | None, record: Mapping[str, Any]) -> None:
        """Take what came of a run."""
        if name not in self.names or not isinstance(seed, int):
            return
        self.values[name, seed] = value
        if value is None:
            error, trace = str(record.get("error", "")), str(record.get("trace", ""))
            self.failures[name, seed] = FailedRun(name, seed, error, trace)

    def jobs(self) -> Iterator[Job]:
        """Yield the runs that are needed, as far as is known when the next one is asked for."""
        for seed in self.seeds:
            for name in self.names:
                if self._is_needed(name) and (name, seed) not in self.values:
                    yield {"name": name, "seed": seed, "folder": f"{name}/{seed}"}

    def _is_needed(self, name: str) -> bool:
        """Whether a candidate's further runs can tell something."""
        if name != self.names[0]:
            return self.verdicts[name] == "not settled" and not (
                self._is_given_up(name) or self._is_given_up(self.names[0])
            )
        return any(self._is_needed(other) for other in self.names[1:])

    def _is_given_up(self, name: str) -> bool:
        """Whether its runs have failed too often for more, at the seeds looked at."""
        taken = self.taken[name]
        return len(taken) >= GIVEN_UP and not any(value is not None for value in taken)

    def look(self) -> None:
        """Look at each further seed whose runs are done."""
        while self.seen < len(self.seeds):
            seed = self.seeds[self.seen]
            needed = [name for name in self.names if self._is_needed(name)]
            if not needed or any((name, seed) not in self.values for name in needed):
                return
            for name in self.names:
                value = self.values[name, seed] if name in needed else None
                self.taken[name].append(value)
            first = self.taken[self.names[0]][-1]
            for name in needed:
                own = self.taken[name][-1]
                if name != self.names[0] and own is not None and first is not None:
                    self.differences[name].append(own - first)
                    self.verdicts[name] = self._verdict(name)
            self.seen += 1
            if self.runs.shows:
                self._say(needed)

    def _interval(self, name: str) -> tuple[float, float]:
        return interval(self.differences[name], len(self.seeds), self.each)

    def _verdict(self, name: str) -> Verdict:
        low, high = self._interval(name)
        if self.practical is not None and -self.practical < low <= high < self.practical:
            return "no difference"
        if low > 0 or high < 0:
            return "better" if (low > 0) == (self.runs.mode == "max") else "worse"
        return "not settled"

    def _say(self, needed: list[str]) -> None:
        parts = []
        for name in needed:
            value = self.taken[name][-1]
            parts.append(f"{name} {'failed' if value is None else format(value, '.5g')}")
        say(f"seed {self.seeds[self.seen - 1]}: {', '.join(parts)}")

    def check_runs(self, interrupted: bool) -> None:
        """Refuse candidates that never had a value.

        Raises:
            ConfigurationError: no two of them can be compared.
        """
        if interrupted or any(self.differences.values()) or not self.failures:
            return
        first = next(iter(self.failures.values()))
        raise ConfigurationError(
            f"Nothing can be compared: no seed has values of {self.names[0]!r} and of another. "
            f"The first run that failed, of {first.name!r} with seed {first.seed}: {first.error}"
            f"\n\n{first.trace}"
        )

    def comparison(self, *, interrupted: bool) -> Comparison:
        """Return what is known."""
        pairs = {}
        for name, differences in self.differences.items():
            count = len(differences)
            mean = math.fsum(differences) / count if count else math.nan
            pairs[name] = Pair(name, mean, self._interval(name), count, self.verdicts[name])
        seeds = self.seeds[: self.seen]
        failed = [self.failures[n, s] for s in seeds for n in self.names if (n, s) in self.failures]
        return Comparison(
            self.taken,
            pairs,
            seeds,
            failed,
            self.runs.work.metric,
            self.runs.mode,
            self.level,
            self.practical,
            interrupted,
        )
