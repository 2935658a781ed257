"""What compile was given as metrics: checked at once, built and fed by output in each call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fitkit.arguments import callable_name, check_takes_pair, describe, snake_case
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.metrics.conversions import FirstBatch
from fitkit.metrics.group import MetricSpec, OutputGroup
from fitkit.metrics.named import NAMES, weightable_names
from fitkit.metrics.sums import State, changeable
from fitkit.metrics.torchmetrics_adapter import is_torchmetric, refuse_aggregation
from fitkit.outputs import (
    SINGLE,
    LossHint,
    log_name,
    named_outputs,
    targets_by_output,
    weights_by_output,
)


class CompiledMetrics:
    """The metrics that compile was given, checked at once.

    `begin` gives those of one call of fit or evaluate, which `start` builds by the first batch and
    `update` feeds. All values are over the samples of this process.

    Args:
        metrics: a metric, or a list (for every output), a list of lists (one an output) or a
            dict (one entry an output; for a net with a single output chosen names). A metric is
            a name, a torchmetrics object, a `MetricCollection`, or a callable
            `(prediction, target)` that gives the batch's mean or one value a sample.
        weighted_metrics: the same; their values are weighted by the sample weights. Only means
            over samples can be: names such as `"accuracy"` and `"mae"`, and callables that
            give one value a sample.

    Raises:
        ConfigurationError: an unknown name, or what can't be a metric.

    Attributes:
        only: the group of the net's one output; None before a first batch, and where it has
            several.
    """

    def __init__(self, metrics: Any = None, weighted_metrics: Any = None) -> None:
        given = Specs(metrics, "metrics"), Specs(weighted_metrics, "weighted_metrics")
        self._given = [specs for specs in given if specs]
        self._groups: dict[Hashable, OutputGroup] | None = None
        self.only: OutputGroup | None = None
        self._trained: Sequence[Any] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    @property
    def known_names(self) -> list[str]:
        """The names logged by a net with a single output, as far as they are known by now."""
        given = [spec for specs in self._given for spec in specs.for_unnamed_output()]
        return list(by_log_name({SINGLE: given})[SINGLE])

    def begin(self) -> CompiledMetrics:
        """These metrics for one call of a verb, without any samples, so that calls can nest.

        The user's torchmetrics objects are copied; the objects themselves stay as they are.
        """
        fresh = copy.copy(self)
        fresh._groups = fresh.only = None
        return fresh

    def start(
        self,
        prediction: Any,
        target: Any,
        hint: Callable[[Any], LossHint],
        trained: Sequence[Any] = (),
    ) -> None:
        """Build the metrics by the first batch; later calls do nothing.

        Args:
            prediction: what the net gave.
            target: its targets.
            hint: gives for an output what its loss says about its numbers.
            trained: the outputs that have a loss; targets may be those of them alone.

        Raises:
            ConfigurationError: metrics that don't fit the outputs, or an output whose
                task isn't clear.
        """
        if self._groups is not None:
            return
        outputs: dict[Any, Any] = named_outputs(prediction)
        self._trained = trained
        targets = targets_by_output(target, list(outputs), trained)
        found: dict[Any, list[MetricSpec]] = {output: [] for output in outputs}
        for specs in self._given:
            for output, of_output in specs.for_outputs(list(outputs)).items():
                if of_output and _has_target(specs, output, targets):
                    found[output] += of_output
        groups: dict[Hashable, OutputGroup] = {}
        for output, named in by_log_name(found).items():
            if named:
                first = FirstBatch(outputs[output], targets[output], hint(output))
                with changeable():
                    groups[output] = OutputGroup(named, first)
        self._groups = groups
        if len(outputs) == 1:
            self.only = next(iter(groups.values()), None)

    @property
    def has_user_code(self) -> bool:
        """Whether code of the user's sees each batch; after `start`."""
        return any(group.sees_each for group in self._started())

    def update(self, prediction: Any, target: Any, weight: Any = None) -> None:
        """Add a batch; its gradients don't count.

        Args:
            prediction: what the net gave.
            target: its targets.
            weight: one weight a sample, or a dict or list of them by output; None: 1 each.
        """
        only = self.only
        if (
            only is not None
            and isinstance(prediction, Tensor)
            and isinstance(target, Tensor)
            and (weight is None or isinstance(weight, Tensor))
        ):
            only.update(prediction, target, weight)
            return
        if self._groups is None:
            raise RuntimeError("CompiledMetrics.update() came before CompiledMetrics.start()")
        outputs: dict[Any, Any] = named_outputs(prediction)
        names = list(outputs)
        targets = targets_by_output(target, names, self._trained)
        weights = weights_by_output(weight, names, self._trained)
        for name, group in self._groups.items():
            group.update(outputs[name], targets[name], weights.get(name))

    def flush(self) -> None:
        """Count the batches that wait, now that no more come."""
        for group in self._started():
            group.flush()

    @contextlib.contextmanager
    def up_to_date(self) -> Iterator[None]:
        """Meanwhile all values count the batches that wait, which are joined once for them."""
        with contextlib.ExitStack() as stack:
            for group in self._started():
                stack.enter_context(group.up_to_date())
            yield

    def results(self) -> dict[str, Any]:
        """The values over all samples so far, by name.

        Returns:
            Python floats; an array for a metric of several numbers; for a metric that gives a
            dict one entry a key, `<name>_<key>`. Metrics without samples are left out.
        """
        return dict(pair for group in self._started() for pair in group.results())

    def loss_sums(self) -> tuple[float, float]:
        """The sum of the losses that `OutputGroup.join_loss` lets be computed, and their number."""
        return (0.0, 0) if self.only is None else self.only.loss_sums()

    def reset(self) -> None:
        """Forget all samples; the metrics stay as the first batch let them be built."""
        for group in self._started():
            group.reset()

    def state(self) -> dict[str, State] | None:
        """What was summed up on this rank, as plain data by name; None before `start`."""
        if self._groups is None:
            return None
        return {k: state for group in self._started() for k, state in group.states().items()}

    def merge(self, states: list[dict[str, State]]) -> None:
        """Take the sums of all ranks in place of this rank's own; `reset` ends that.

        Args:
            states: the `state` of each rank that has one.
        """
        for group in self._started():
            group.load_merged(states)

    def _started(self) -> Iterable[OutputGroup]:
        return () if self._groups is None else self._groups.values()


def _has_target(specs: Specs, output: Hashable, targets: Mapping[Any, Any]) -> bool:
    """Whether an output has targets; metrics for every output go to those that have."""
    if output not in targets and specs.is_by_output:
        raise ConfigurationError(
            f"{specs.argument} were given for the output {output!r}, but the targets are those of "
            f"{list(targets)}."
        )
    return output in targets


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
        """Whether each output was given metrics of its own, rather than all the same list."""
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
        named = NAMES[metric] if isinstance(metric, str) else None
        if getattr(named and named.build, "__module__", "").startswith("fitkit."):
            named = None  # every process has these
        yield MetricSpec(_default_name(metric), metric, self._weighted, named)

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
    # The metrics of a collection keep their own names behind the chosen one.
    if len(entries) == 1:
        return [dataclasses.replace(entries[0], name=name)]
    return [dataclasses.replace(entry, name=f"{name}_{entry.name}") for entry in entries]


def _is_group(value: Any) -> bool:
    # The metrics of one output, rather than one metric.
    return value is None or isinstance(value, (list, tuple, Mapping))


def by_log_name(specs: Mapping[Any, Iterable[MetricSpec]]) -> dict[Any, dict[str, MetricSpec]]:
    """Each output's metrics by the names under which they are logged, as Keras chooses them.

    The second `mae` becomes `mae_1`. A weighted metric whose name a plain one has becomes
    `weighted_mae`. `loss` is taken from the start: a metric of that name becomes `loss_1`.

    Args:
        specs: the metrics of each output, of those without any too.
    """
    taken = {"loss", *(log_name(str(output), "loss") for output in specs)}
    named: dict[Any, dict[str, MetricSpec]] = {output: {} for output in specs}
    for output, of_output in specs.items():
        for spec in of_output:
            name = log_name(str(output), spec.name)
            if spec.weighted and name in taken:
                name = log_name(str(output), f"weighted_{spec.name}")
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            name = next(free for free in itertools.chain([name], numbered) if free not in taken)
            taken.add(name)
            named[output][name] = spec
    return named
