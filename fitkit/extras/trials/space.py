"""What a search chooses settings from, and what chooses them: random numbers, or Optuna."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fitkit.arguments import check_flag, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package
from fitkit.registry import did_you_mean

Setting = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Between:
    """A number from a range, for the space of `fitkit.tune.search`.

    Args:
        low, high: the range, with its ends. Two ints give ints, other numbers give floats.
        log: whether each factor is as likely as any other: from 0.001 to 0.01 as from 0.01 to 0.1.
            Default False.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid.

    Example:
        >>> from fitkit.tune import Between
        >>> space = {"rate": Between(1e-4, 1e-1, log=True), "width": Between(8, 64)}
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        low = check_number("low", self.low)
        check_number("high", self.high, above=low)
        if check_flag("log", self.log) and low <= 0:
            raise ConfigurationError(f"low={low} must be above 0 with log=True.")

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are ints."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, part: float) -> float:
        """Return the number at a part of the range, from 0 to below 1."""
        # Each int has the room of one: half below it and half above it.
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        if self.log:
            number = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
        else:
            number = low + part * (high - low)
        if self.is_whole:
            return min(max(round(number), int(self.low)), int(self.high))
        return number


Space = Mapping[str, Between | Sequence[Setting]]


def checked_space(space: object) -> dict[str, Between | list[Setting]]:
    """Return a space with its choices as lists.

    Raises:
        ArgumentTypeError, ConfigurationError: it is none.
    """
    if not isinstance(space, Mapping) or not space:
        raise ArgumentTypeError(
            f"space={describe(space)} must be a dict, like {{'rate': Between(1e-4, 1e-1, "
            "log=True), 'optimizer': ['adam', 'sgd']}."
        )
    found: dict[str, Between | list[Setting]] = {}
    for name, given in space.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"space has {describe(name)}, which is no argument's name.")
        if isinstance(given, Between):
            found[name] = given
            continue
        plain = (str, int, float, bool, type(None))
        is_list = isinstance(given, (list, tuple)) and len(given) > 0
        if not is_list or not all(isinstance(one, plain) for one in given):
            raise ArgumentTypeError(
                f"space[{name!r}]={describe(given)} must be a Between(low, high), or a list of "
                "strings, numbers and flags. For classes and functions, list names, and choose by "
                "them in the function that builds the model."
            )
        found[name] = list(given)
    return found


class Chooser:
    """Chooses the settings of each run by random numbers; the same for a run's number.

    Args:
        space: from `checked_space`.
        seed: of the random numbers.
    """

    def __init__(self, space: dict[str, Between | list[Setting]], seed: int) -> None:
        self._space = space
        self._seed = seed

    def choose(self, number: int, params: dict[str, Any] | None) -> dict[str, Any]:
        """Return a run's settings.

        Args:
            number: the run's, from 0.
            params: its settings, where an earlier call has chosen them.
        """
        if params is not None:
            return params
        parts = np.random.default_rng([self._seed, number]).random(len(self._space))
        return {
            name: given.at(part) if isinstance(given, Between) else given[int(part * len(given))]
            for (name, given), part in zip(self._space.items(), parts.tolist(), strict=True)
        }

    def is_pruned(self, number: int, epoch: int, value: float) -> bool:
        """Whether a run is worse than what is worth its time, after an epoch with a value."""
        return False

    def tell(self, record: Mapping[str, Any]) -> None:
        """Take what came of a run, of this call or an earlier one."""


SAMPLERS = {"random": "RandomSampler", "tpe": "TPESampler"}
PRUNERS = {"median": "MedianPruner", "hyperband": "HyperbandPruner"}


class OptunaChooser(Chooser):
    """Lets Optuna choose settings, and which runs end early.

    Args:
        space, seed: as of `Chooser`.
        mode: `"min"` or `"max"`.
        sampler: `"tpe"` or `"random"`, or a sampler of Optuna.
        pruner: `"median"` or `"hyperband"`, or a pruner of Optuna; None ends no run.

    Raises:
        MissingPackageError: Optuna isn't installed.
    """

    def __init__(
        self,
        space: dict[str, Between | list[Setting]],
        seed: int,
        mode: str,
        sampler: Any,
        pruner: Any,
    ) -> None:
        super().__init__(space, seed)
        try:
            import optuna
        except ImportError:
            raise missing_package("optuna", "optuna", "this sampler or pruner") from None
        self._optuna = optuna
        if isinstance(sampler, str):
            sampler = getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed)
        if isinstance(pruner, str):
            pruner = getattr(optuna.pruners, PRUNERS[pruner])()
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                direction="minimize" if mode == "min" else "maximize",
                sampler=sampler,
                pruner=pruner or optuna.pruners.NopPruner(),
            )
        finally:
            optuna.logging.set_verbosity(before)
        self._distributions = {name: self._distribution(one) for name, one in space.items()}
        self._trials: dict[int, Any] = {}

    def _distribution(self, given: Between | list[Setting]) -> Any:
        kinds = self._optuna.distributions
        if not isinstance(given, Between):
            return kinds.CategoricalDistribution(given)
        kind = kinds.IntDistribution if given.is_whole else kinds.FloatDistribution
        return kind(given.low, given.high, log=given.log)

    def choose(self, number: int, params: dict[str, Any] | None) -> dict[str, Any]:
        if params is not None:
            self._study.enqueue_trial(params)
        trial = self._study.ask(self._distributions)
        self._trials[number] = trial
        return dict(trial.params)

    def is_pruned(self, number: int, epoch: int, value: float) -> bool:
        trial = self._trials[number]
        trial.report(value, epoch)
        return bool(trial.should_prune())

    def tell(self, record: Mapping[str, Any]) -> None:
        states = self._optuna.trial.TrialState
        names = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        state, value = names[record["state"]], record.get("value")
        reports = {int(epoch): value for epoch, value in record.get("reports", {}).items()}
        trial = self._trials.pop(record["number"], None)
        if trial is not None:
            self._study.tell(trial, value if state is states.COMPLETE else None, state=state)
            return
        if state is states.PRUNED and not reports:
            return
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state,
                params=dict(record["params"]),
                distributions=self._distributions,
                value=value if state is states.COMPLETE else None,
                intermediate_values=reports,
            )
        )


def make_chooser(
    space: dict[str, Between | list[Setting]], seed: int, mode: str, sampler: Any, pruner: Any
) -> Chooser:
    """Return what chooses settings.

    Raises:
        ArgumentTypeError, ConfigurationError: the sampler or the pruner is none.
        MissingPackageError: they need Optuna, which isn't installed.
    """
    checks: tuple[tuple[str, Any, dict[str, str], str], ...] = (
        ("sampler", sampler, SAMPLERS, "sample_independent"),
        ("pruner", pruner, PRUNERS, "prune"),
    )
    for name, given, known, method in checks:
        if isinstance(given, str) and given not in known:
            raise ConfigurationError(
                f"{name}={given!r} isn't known.{did_you_mean(given, known)} Write "
                f"{' or '.join(map(repr, known))}, or give an object of Optuna's."
            )
        if given is not None and not isinstance(given, str) and not hasattr(given, method):
            raise ArgumentTypeError(f"{name}={describe(given)} must be a name or Optuna's {name}.")
    if sampler == "random" and pruner is None:
        return Chooser(space, seed)
    return OptunaChooser(space, seed, mode, sampler or "random", pruner)
