"""A search: a list of runs whose settings a sampler chooses."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from fitkit.arguments import check_count
from fitkit.errors import warn
from fitkit.extras.text_files import as_json
from fitkit.extras.trials.arguments import check_builder, checked_runs, known_value
from fitkit.extras.trials.pool import Job, outcomes
from fitkit.extras.trials.runs import Notes
from fitkit.extras.trials.space import Chooser, Space, checked_space, make_chooser
from fitkit.printing import say
from fitkit.typing import Arrays, Data

State = Literal["complete", "pruned", "failed"]
STATES = ("complete", "pruned", "failed")


@dataclasses.dataclass(frozen=True)
class SearchRun:
    """One run of a search.

    Attributes:
        number: which, from 0.
        params: its settings.
        value: its value; None if it was pruned or failed.
        state: `"complete"`, `"pruned"` or `"failed"`.
        reports: the values of its epochs, if there was a pruner.
        error, trace: why it failed, in a line and whole; "" if it didn't.

    Example:
        >>> from fitkit.tune import Search, SearchRun
        >>> found = Search([SearchRun(0, {"rate": 0.01}, 0.25, "complete")], "val_loss", "min")
        >>> str(found)
        'val_loss 0.25 with rate=0.01'
    """

    number: int
    params: dict[str, Any]
    value: float | None
    state: State
    reports: dict[int, float] = dataclasses.field(default_factory=dict)
    error: str = ""
    trace: str = ""


@dataclasses.dataclass(frozen=True)
class Search:
    """What `search` found.

    Attributes:
        runs: the best first; then those that were pruned, then those that failed.
        metric, mode: the value, and whether `"min"` or `"max"` is better.
        interrupted: whether Ctrl-C ended it.

    Example:
        >>> from fitkit.tune import Search
        >>> str(Search([], "val_loss", "min"))
        'no run has a val_loss'
    """

    runs: list[SearchRun]
    metric: str
    mode: str
    interrupted: bool = False

    @property
    def best(self) -> SearchRun | None:
        """The best run; None if none is complete."""
        first = self.runs[0] if self.runs else None
        return first if first is not None and first.state == "complete" else None

    def __str__(self) -> str:
        if self.best is None:
            text = f"no run has a {self.metric}"
        else:
            text = f"{self.metric} {self.best.value:.5g} with {_shown(self.best.params)}"
        return text + (", interrupted" if self.interrupted else "")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        plain: dict[str, Any] = as_json(dataclasses.asdict(self))
        best = None if self.best is None else plain["runs"][0]
        return {"best": best, **plain}

    def to_json(self) -> str:
        """Return the same as JSON, for a script to print."""
        return json.dumps(self.to_dict())

    def summary(self, rows: int = 10) -> None:
        """Print a table of the best runs.

        Args:
            rows: how many. Default 10.
        """
        from rich import box
        from rich.console import Console
        from rich.table import Table

        check_count("rows", rows)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        names = list(dict.fromkeys(name for run in self.runs for name in run.params))
        for head in ("run", self.metric, *names):
            table.add_column(head, justify="right")
        for run in self.runs[:rows]:
            value = run.state if run.value is None else f"{run.value:.5g}"
            table.add_row(str(run.number), value, *(_setting(run.params[name]) for name in names))
        console = Console()
        console.print(table)
        console.print(str(self), markup=False, highlight=False)


def _setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shown(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_setting(value)}" for name, value in params.items())


def search(
    build: Callable[..., Any],
    space: Space,
    x: Data | None = None,
    y: Arrays | None = None,
    *,
    metric: str = "val_loss",
    mode: Literal["auto", "min", "max"] = "auto",
    runs: int = 20,
    sampler: Any = "random",
    pruner: Any = None,
    seed: int = 0,
    take: Literal["last", "best"] = "last",
    workers: int | Literal["auto"] = "auto",
    threads: int = 1,
    folder: str | os.PathLike[str] | None = None,
    verbose: Literal["auto", 0, 1] = "auto",
    **fit: Any,
) -> Search:
    """Train models with settings from a space, and return the runs, the best first.

    All runs have the same seed, so they differ by their settings alone. The best of many is partly
    luck, all the same: compare it with what you had, with other seeds, by `fitkit.tune.compare`.

    Args:
        build: called with a run's settings by name. It builds a new net and returns a compiled
            model, or `(model, arguments)` with arguments of `fit`.
        space: for each setting a `Between(low, high)`, or a list of strings, numbers and flags.
        x, y: as in `fit`. The data must be readable more than once.
        metric, mode, take: as in `fitkit.tune.compare`.
        runs: how many runs, with those of an earlier call in the same folder. Default 20.
        sampler: what chooses settings: `"random"` (default), or with the extra `optuna` `"tpe"` or
            a sampler of Optuna.
        pruner: what ends bad runs early, with the extra: `"median"`, `"hyperband"` or a pruner of
            Optuna. Default None.
        seed: of the runs, and of the sampler if it has a name. Default 0.
        workers, threads: as in `fitkit.tune.compare`. With several workers, a sampler of Optuna
            knows the results in the order in which they come, which may differ from call to call.
        folder: where `runs.jsonl` keeps each run, and each run is a `RunFolder`. A call with the
            same folder goes on from there: runs that were cut continue. Default None: nowhere.
        verbose: 0 prints nothing. 1 or `"auto"` (default) prints a line for each run, and a table.
        fit: arguments of `fit` for all runs: `epochs`, `batch_size`, `validation_data`, ….

    Returns:
        The search, with `best` and `runs`. After Ctrl-C, with the runs that have ended.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid, or the folder has other runs.
        MissingPackageError: Optuna isn't installed, and is asked for.

    Example:
        >>> import torch, fitkit
        >>> def build(rate):
        ...     model = fitkit.Model(torch.nn.Linear(4, 1))
        ...     model.compile("sgd", "mse", learning_rate=rate)
        ...     return model
        >>> x = torch.randn(96, 4)
        >>> y = x.sum(1, keepdim=True)
        >>> space = {"rate": fitkit.tune.Between(1e-4, 0.3, log=True)}
        >>> found = fitkit.tune.search(
        ...     build, space, x, y, validation_split=0.25, runs=4, workers=1, verbose=0
        ... )
        >>> found.best.params["rate"] > 1e-3
        True
    """
    check_builder("build", build)
    wanted = check_count("runs", runs)
    seed = check_count("seed", seed, minimum=0)
    checked = checked_space(space)
    given = checked_runs(
        "search", {"run": build}, x, y, fit, metric=metric, mode=mode, take=take,
        workers=workers, threads=threads, folder=folder, verbose=verbose,
        reports=pruner is not None,
    )  # fmt: skip
    chooser = make_chooser(checked, seed, given.mode, sampler, pruner)
    described = {
        name: one if isinstance(one, list) else dataclasses.asdict(one)
        for name, one in checked.items()
    }
    about = {**given.about, "space": described, "seed": seed}
    found: dict[int, SearchRun] = {}
    interrupted = False
    with Notes(given.folder, about) as notes:
        begun = _known(notes, set(checked), found)
        for run in found.values():
            chooser.tell(dataclasses.asdict(run))
        reports: dict[int, dict[int, float]] = {}

        def answer(job: Job, asked: dict[str, Any]) -> bool:
            epoch, value = asked["epoch"], asked["value"]
            reports.setdefault(job["number"], {})[epoch] = value
            return chooser.is_pruned(job["number"], epoch, value)

        jobs = _jobs(wanted, seed, chooser, notes, found, begun)
        trainings = outcomes(given.work, jobs, given.places, given.threads, answer)
        try:
            for outcome in trainings:
                job, told = outcome.job, outcome.value or {}
                state: State = "pruned" if told.get("pruned") else "complete"
                run = SearchRun(
                    job["number"], job["params"], told.get("value"),
                    "failed" if outcome.error else state,
                    reports.get(job["number"], {}), outcome.error, outcome.trace,
                )  # fmt: skip
                notes.add(dataclasses.asdict(run))
                chooser.tell(dataclasses.asdict(run))
                found[run.number] = run
                if given.shows:
                    value = run.error or (run.state if run.value is None else f"{run.value:.5g}")
                    say(f"run {run.number}: {_shown(run.params)}: {value}")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            trainings.close()  # type: ignore[attr-defined]
    result = Search(_ordered(found, given.mode), metric, given.mode, interrupted)
    if given.shows:
        result.summary()
    failed = next((run for run in result.runs if run.state == "failed"), None)
    if result.best is None and failed is not None and not interrupted:
        warn(f"No run of {len(result.runs)} has a {metric}. Run {failed.number}: {failed.error}")
    return result


def _known(notes: Notes, names: set[str], found: dict[int, SearchRun]) -> dict[int, dict[str, Any]]:
    """Take the runs that earlier calls have written down.

    Args:
        found: gets those that have ended.

    Returns:
        The settings of those that have begun, by number.
    """
    begun: dict[int, dict[str, Any]] = {}
    for record in notes.known:
        number, params, state = (record.get(name) for name in ("number", "params", "state"))
        if not isinstance(number, int) or not isinstance(params, dict) or set(params) != names:
            continue
        begun[number] = params
        value = known_value(record)
        if state not in STATES or (state == "complete" and value is None):
            continue
        reports = record.get("reports")
        found[number] = SearchRun(
            number, params, value, state,
            {int(epoch): float(at) for epoch, at in (reports or {}).items()},
            str(record.get("error", "")), str(record.get("trace", "")),
        )  # fmt: skip
    return begun


def _jobs(
    runs: int,
    seed: int,
    chooser: Chooser,
    notes: Notes,
    found: dict[int, SearchRun],
    begun: dict[int, dict[str, Any]],
) -> Iterator[Job]:
    """Yield the runs that haven't ended, with settings that are chosen when they are asked for."""
    for number in range(runs):
        if number in found:
            continue
        params = chooser.choose(number, begun.get(number))
        notes.add({"number": number, "params": params})
        yield {
            "name": "run",
            "seed": seed,
            "number": number,
            "params": params,
            "folder": str(number),
        }


def _ordered(found: Mapping[int, SearchRun], mode: str) -> list[SearchRun]:
    sign = 1 if mode == "min" else -1

    def place(run: SearchRun) -> tuple[int, float, int]:
        return STATES.index(run.state), sign * (run.value or 0.0), run.number

    return sorted(found.values(), key=place)
