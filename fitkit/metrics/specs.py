"""What compile was given as metrics: checked at once, given to the outputs at the first batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fitkit.arguments import callable_name, check_takes_pair, describe, snake_case
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.metrics.named import NAMES, weightable_names
from fitkit.metrics.torchmetrics_adapter import is_torchmetric, refuse_aggregation
from fitkit.outputs import SINGLE, log_name


@dataclasses.dataclass(frozen=True)
class MetricSpec:
    """One metric and the name that it logs, before clashes are settled."""

    name: str
    metric: Any
    weighted: bool


class Specs:
    """The metrics of one argument of compile.

    Args:
        metrics: a metric, a list (for every output), a list of lists (one an output) or a dict
            (by output; for a net with a single output by chosen name).
        argument: `"metrics"` or `"weighted_metrics"`.

    Raises:
        ConfigurationError: what can't be a metric.
    """

    def __init__(self, metrics: Any, argument: str) -> None:
        self.argument = argument
        self._weighted = argument == "weighted_metrics"
        self._flat: list[MetricSpec] = []
        self._lists: list[list[MetricSpec]] | None = None
        self._by_key: dict[Hashable, list[MetricSpec]] | None = None
        self._keys_may_be_names = False
        if isinstance(metrics, Mapping):
            self._check_keys(metrics, outputs=True)
            self._by_key = {key: self._entries(value) for key, value in metrics.items()}
            self._keys_may_be_names = not any(_is_group(value) for value in metrics.values())
        elif isinstance(metrics, (list, tuple)) and any(_is_group(item) for item in metrics):
            self._lists = [self._entries(item) for item in metrics]
        else:
            self._flat = self._entries(metrics)

    def __bool__(self) -> bool:
        return bool(self._flat or self._lists or self._by_key)

    @property
    def is_by_output(self) -> bool:
        """Whether outputs were told apart, rather than given the same list."""
        return not self._flat

    def for_unnamed_output(self) -> list[MetricSpec]:
        """The metrics of a net with a single output; none where they are for several."""
        return self._for_single(SINGLE) or []

    def for_outputs(self, outputs: Sequence[Any]) -> dict[Any, list[MetricSpec]]:
        """The metrics of each output.

        Raises:
            ConfigurationError: keys that are no output's, or as many lists as there aren't outputs.
        """
        if self._by_key is not None and all(key in outputs for key in self._by_key):
            return {output: self._by_key.get(output, []) for output in outputs}
        if len(outputs) == 1:
            single = self._for_single(outputs[0])
            if single is not None:
                return {outputs[0]: single}
        if self._by_key is not None:
            unknown = [key for key in self._by_key if key not in outputs]
            raise ConfigurationError(
                f"{self.argument} names {unknown}, but the net's outputs are {list(outputs)}."
            )
        if self._lists is not None:
            if len(self._lists) != len(outputs):
                raise ConfigurationError(
                    f"{self.argument} has {len(self._lists)} lists, but the net has {len(outputs)} "
                    f"outputs: {list(outputs)}. Give one list an output, a dict by name, or one "
                    "list without lists inside for every output."
                )
            return dict(zip(outputs, self._lists, strict=True))
        return dict.fromkeys(outputs, self._flat)

    def _for_single(self, output: Hashable) -> list[MetricSpec] | None:
        """The metrics of a single output; None where what was given is for several."""
        if self._lists is not None:
            return self._lists[0] if len(self._lists) == 1 else None
        if self._by_key is None:
            return self._flat
        if self._keys_may_be_names:
            return [e for key, found in self._by_key.items() for e in _renamed(found, str(key))]
        if len(self._by_key) == 1 and output == SINGLE:
            return next(iter(self._by_key.values()))
        return None

    def _check_keys(self, metrics: Mapping[Any, Any], *, outputs: bool = False) -> None:
        """Refuse keys that can't be names; a net may call its outputs by numbers too."""
        for key in metrics:
            if key in (None, "") or not (outputs or isinstance(key, str)):
                raise ArgumentTypeError(
                    f"{self.argument} has the key {describe(key)}: keys are names of outputs or "
                    "of metrics."
                )

    def _entries(self, value: Any) -> list[MetricSpec]:
        if value is None:
            return []
        if isinstance(value, Mapping):
            self._check_keys(value)
            found = [(name, list(self._metric(item))) for name, item in value.items()]
            return [entry for name, entries in found for entry in _renamed(entries, name)]
        if isinstance(value, (list, tuple)):
            return [entry for item in value for entry in self._metric(item)]
        return list(self._metric(value))

    def _metric(self, metric: Any) -> Iterator[MetricSpec]:
        if is_torchmetric(metric, "MetricCollection"):
            for name, part in metric.items():
                self._check(part)
                yield MetricSpec(name, part, self._weighted)
            return
        self._check(metric)
        yield MetricSpec(_default_name(metric), metric, self._weighted)

    def _check(self, metric: Any) -> None:
        if isinstance(metric, str):
            named = NAMES[metric]
            if self._weighted and not named.weightable:
                raise self._not_weightable(repr(metric))
        elif isinstance(metric, type):
            raise ArgumentTypeError(
                f"{self.argument} has the class {metric.__name__}: add () to make an object of it."
            )
        elif is_torchmetric(metric):
            if self._weighted:
                raise self._not_weightable(type(metric).__name__)
            refuse_aggregation(metric, self.argument)
        elif callable(metric):
            check_takes_pair(metric, f"The metric {callable_name(metric)}", "metric")
        else:
            raise ArgumentTypeError(
                f"{self.argument} has {describe(metric)}, but a metric is a name, a torchmetrics "
                "object or a callable (prediction, target)."
            )

    def _not_weightable(self, metric: str) -> ConfigurationError:
        return ConfigurationError(
            f"weighted_metrics has {metric}, which isn't a mean over samples, so sample weights "
            "have no meaning for it. Pass it as metrics, which ignore weights. These can be "
            f"weighted: {', '.join(weightable_names())}, and callables (prediction, target) that "
            "give one value a sample."
        )


def _default_name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric.strip()
    if is_torchmetric(metric):
        return snake_case(type(metric).__name__)
    return callable_name(metric)


def _renamed(entries: list[MetricSpec], name: str) -> list[MetricSpec]:
    """One thing's entries under its chosen name; a collection's keep their own behind it."""
    if len(entries) == 1:
        return [dataclasses.replace(entries[0], name=name)]
    return [dataclasses.replace(entry, name=f"{name}_{entry.name}") for entry in entries]


def _is_group(value: Any) -> bool:
    """Whether a value stands for the metrics of one output, rather than for one metric."""
    return value is None or isinstance(value, (list, tuple, Mapping))


class LogKeys:
    """Gives each metric a key of its own, as Keras does.

    The second `mae` becomes `mae_1`. A weighted metric whose name a plain one has becomes
    `weighted_mae`. `loss` is taken from the start: a metric of that name becomes `loss_1`.
    """

    def __init__(self, outputs: Iterable[Hashable]) -> None:
        self._taken = {"loss", *(log_name(str(output), "loss") for output in outputs)}

    def key(self, output: Hashable, name: str, *, weighted: bool = False) -> str:
        """The key of the next metric, which is then taken."""
        if weighted and log_name(str(output), name) in self._taken:
            name = f"weighted_{name}"
        key = candidate = log_name(str(output), name)
        number = 0
        while candidate in self._taken:
            number += 1
            candidate = f"{key}_{number}"
        self._taken.add(candidate)
        return candidate
