"""The validations of a `fit`: when they are due, and their values."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from fitkit.callbacks import CallbackList
from fitkit.data.batches import Source
from fitkit.data.sources import set_label
from fitkit.errors import ConfigurationError
from fitkit.module import Module
from fitkit.training.evaluate import evaluate_source
from fitkit.training.passes import VALIDATION
from fitkit.training.settings import FitArguments
from fitkit.training.step_for import Step, step_for
from fitkit.training.surroundings import rank_source
from fitkit.training.validation_names import named_values
from fitkit.typing import PlainData, Values


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where in an epoch validations are due, beside its end.

    Attributes:
        epoch_steps: the steps of an epoch; None if unknown.
        interval: the batches between two validations; None if there are none within epochs.
    """

    epoch_steps: int | None
    interval: Fraction | None = None

    def is_due(self, steps: int, last: int) -> bool:
        """Return whether one is due.

        Args:
            steps: the epoch's so far.
            last: those before its last validation.
        """
        if self.interval is None or steps == self.epoch_steps:
            return False
        return steps // self.interval > last // self.interval


class Validations:
    """Evaluates a fit's validation sets.

    Args:
        model: the model that is trained.
        arguments: the arguments of `fit`.

    Attributes:
        sources: this rank's share of the sets, by name.
        names: the names of their values, once known.
        plan: where they are due, once `plan_for` has been called.
    """

    def __init__(self, model: Module, arguments: FitArguments) -> None:
        self._model, self._arguments = model, arguments
        self.sources: dict[str, Source] = {
            name: rank_source(model, source, training=False, steps=arguments.validation_steps)
            for name, source in arguments.held_out.items()
        }
        self.names: set[str] = set()
        self._steps: dict[str, Step] = {}
        self.plan: Plan = Plan(None)

    def plan_for(self, steps: int | None) -> None:
        """Plan where they are due within epochs.

        Args:
            steps: of an epoch on this rank; None if unknown.

        Ranks:
            Collective.
        """
        arguments, ranks = self._arguments, self._model._fitkit.compilation.strategy.collectives
        self.plan = Plan(steps)
        if arguments.held_out and arguments.validates_within_epochs:
            # Loaders that shard themselves may differ in length. The longest sets the steps.
            everyones = ranks.gather(steps)
            longest = None if None in everyones else max(everyones)
            self.plan = Plan(longest, arguments.batches_between_validations(longest))

    def values(self, callbacks: CallbackList, params: PlainData) -> Values:
        """Evaluate all sets; return the values by their names in an epoch's logs.

        Args:
            callbacks: the fit's.
            params: what these are given, which says which set is evaluated.

        Ranks:
            Collective.
        """
        named: Values = {}
        for set_name, source in self.sources.items():
            values = named_values(self._of(set_name, source, callbacks, params), set_name)
            for name in named.keys() & values.keys():
                raise ConfigurationError(
                    f"Two validation sets log {name!r}: {', '.join(self.sources)}. Give one of "
                    "them another name."
                )
            named.update(values)
        self.names.update(named)
        return named

    def _of(self, name: str, source: Source, callbacks: CallbackList, params: PlainData) -> Values:
        """Evaluate one set."""
        model, label = self._model, set_label(name)
        step = self._steps.get(name)
        if step is None:
            step = self._steps[name] = step_for(
                model, "validation", all_targets=[source.target], source=source, name=label
            )
            step.mover.bring_whole(source)
        steps = self._arguments.validation_steps
        params.update(validation_set=name, validation_steps=steps or source.steps)
        with model._around_validation():
            return evaluate_source(model, source, steps, VALIDATION, step, callbacks, name=label)
