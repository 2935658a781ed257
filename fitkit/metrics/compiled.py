"""The metrics of `compile`: checked at once, and built and fed by output in each call."""

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
from fitkit.metrics.named import NAMES, Named, weightable_names
from fitkit.metrics.sums import State, changeable
from fitkit.metrics.torchmetrics_adapter import is_torchmetric, refuse_aggregation
from fitkit.outputs import (
    SINGLE,
    LossHint,
    Outputs,
    by_output,
    log_name,
    named_outputs,
    targets_by_output,
    weights_by_output,
)


class CompiledMetrics:
    """The metrics that `compile` was given, checked at once.

    `begin` returns the metrics for one call of fit or evaluate. `start` builds them from the first
    batch, and `update` feeds them. All values cover the samples of this process.

    Args:
        metrics: a metric, a list (for every output), a list of lists (one per output) or a dict
            (one entry per output), nested as the outputs are. For a net with a single output, a
            dict's keys are names that the user chooses. A metric is a name, a torchmetrics object,
            a `MetricCollection`, or a callable `(prediction, target)` that returns the batch's mean
            or one value per sample.
        weighted_metrics: the same. Their values are weighted by the sample weights. Only means
            over samples can be weighted: names such as `"accuracy"` and `"mae"`, and callables that
            return one value per sample.

    Raises:
        ConfigurationError: a name is unknown, or something isn't a metric.

    Attributes:
        only: the group of the net's only output. None before a first batch, and with several
            outputs.
        waits: whether batches may wait for others, to be counted together. Default True. False if
            the values are read after each batch.
    """

    def __init__(self, metrics: Any = None, weighted_metrics: Any = None) -> None:
        given = Specs(metrics, "metrics"), Specs(weighted_metrics, "weighted_metrics")
        self._given = [specs for specs in given if specs]
        self._groups: dict[Hashable, OutputGroup] | None = None
        self.only: OutputGroup | None = None
        self.waits: bool = True
        self._outputs = Outputs({})
        self._trained: Sequence[Any] = ()
        self._weighted: list[Any] = []  # the outputs that have a weighted metric

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    @property
    def groups(self) -> Mapping[Hashable, OutputGroup] | None:
        """The metrics of each output that has some; None before `start`."""
        return self._groups

    def add_group(self, output: Hashable, group: OutputGroup) -> None:
        """Add those of a net's only output, which has none yet. Call it after `start`."""
        self._groups = {output: group}
        self.only = group

    @property
    def known_names(self) -> list[str]:
        """The names that a net with a single output logs, as far as they are known now."""
        given = [spec for specs in self._given for spec in specs.for_unnamed_output()]
        return list(by_log_name({SINGLE: given})[SINGLE])

    @property
    def wait_for_outputs(self) -> bool:
        """Whether they were given for several outputs: the first batch decides the names."""
        return any(specs.for_several() for specs in self._given)

    def begin(self) -> CompiledMetrics:
        """Return these metrics for one call, without any samples, so that calls can nest.

        The user's torchmetrics objects are copied. The objects themselves stay as they are.
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
        """Build the metrics from the first batch. Later calls do nothing.

        Args:
            prediction: the net's prediction.
            target: its targets.
            hint: a function from an output to what its loss says about its numbers.
            trained: the outputs that have a loss. Targets may be for those only.

        Raises:
            ConfigurationError: metrics don't fit the outputs, or an output's task is unclear.
        """
        if self._groups is not None:
            return
        predictions = named_outputs(prediction)
        outputs = self._outputs = Outputs(predictions)
        self._trained = trained
        # A structure of outputs may have one target, which a function compares with all of them.
        top = outputs.within.get(None, {}).values()
        targets = targets_by_output(target, outputs, trained, needed=list(top))
        found: dict[Any, list[MetricSpec]] = {o: [] for o in predictions if o is not None}
        for specs in self._given:
            for output, of_output in specs.for_outputs(outputs, targets).items():
                found[output] += of_output
        groups: dict[Hashable, OutputGroup] = {}
        for output, named in by_log_name(found).items():
            if named:
                first = FirstBatch(predictions[output], targets[output], hint(output))
                with changeable():
                    groups[output] = OutputGroup(named, first, waits=self.waits)
        self._groups = groups
        self._weighted = [o for o, of_output in found.items() if any(s.weighted for s in of_output)]
        if len(outputs.names) == 1:
            self.only = next(iter(groups.values()), None)

    @property
    def has_user_code(self) -> bool:
        """Whether the user's own code sees each batch. Call it after `start`."""
        return any(group.sees_each for group in self._started())

    def update(self, prediction: Any, target: Any, weight: Any = None) -> None:
        """Add a batch, without gradients.

        Args:
            prediction: the net's prediction.
            target: its targets.
            weight: one weight per sample, or a dict or list of them by output. None: 1 each.
        """
        only = self.only
        if (
            only is not None
            and (type(prediction) is Tensor or isinstance(prediction, Tensor))
            and (type(target) is Tensor or isinstance(target, Tensor))
            and (weight is None or isinstance(weight, Tensor))
        ):
            only.update(prediction, target, weight)
            return
        if self._groups is None:
            raise RuntimeError("CompiledMetrics.update() came before CompiledMetrics.start()")
        predictions = named_outputs(prediction)
        outputs, trained = self._outputs, self._trained
        if missing := [name for name in self._groups if name not in predictions]:
            raise ConfigurationError(
                f"The net's first batch had the outputs {outputs.names}, and a later one lacks "
                f"{missing}. Metrics need the same outputs in each batch."
            )
        targets = targets_by_output(target, outputs, trained, self._groups)
        weights = weights_by_output(weight, outputs, trained, self._weighted)
        for name, group in self._groups.items():
            group.update(predictions[name], targets[name], weights.get(name))

    def up_to_date(self) -> contextlib.AbstractContextManager[Any]:
        """Within the block, all values include the waiting batches, which are joined once."""
        if self.only is not None:
            return self.only.up_to_date()
        stack = contextlib.ExitStack()
        for group in self._started():
            stack.enter_context(group.up_to_date())
        return stack

    def results(self) -> dict[str, Any]:
        """Return the values over all samples so far, by name.

        Returns:
            Python floats. An array for a metric of several numbers. For a metric that returns a
            dict, one entry per key, `<name>_<key>`. Metrics without samples are left out.
        """
        return dict(pair for group in self._started() for pair in group.results())

    def loss_sums(self) -> tuple[float, float]:
        """Return the sum of the losses that `OutputGroup.join_loss` collects, and their number."""
        return (0.0, 0) if self.only is None else self.only.loss_sums()

    def reset(self) -> None:
        """Forget all samples. The metrics stay as the first batch built them."""
        for group in self._started():
            group.reset()

    def state(self) -> dict[str, State] | None:
        """Return the sums of this rank, as plain data by name; None before `start`."""
        if self._groups is None:
            return None
        return {k: state for group in self._started() for k, state in group.states().items()}

    def merge(self, states: list[dict[str, State]]) -> None:
        """Replace this rank's own sums by those of all ranks, until `reset`.

        Args:
            states: the `state` of each rank that has one.
        """
        for group in self._started():
            group.load_merged(states)

    def _started(self) -> Iterable[OutputGroup]:
        return () if self._groups is None else self._groups.values()


@dataclasses.dataclass
class _Listed:
    """Metrics for one output, or for each in a structure of outputs.

    Attributes:
        specs: the metrics.
        is_one: whether they were given as one, outside of a list. A dict's key may be their name.
    """

    specs: list[MetricSpec]
    is_one: bool = False

    def __bool__(self) -> bool:
        return bool(self.specs)


class Specs:
    """The metrics of one argument of compile.

    Args:
        metrics: a metric, a list (for every output), a list of lists (one per output) or a dict,
            nested as the outputs are. A dict's keys are outputs. For a net with a single output,
            they may be names that the user chooses.
        argument: `"metrics"` or `"weighted_metrics"`.

    Raises:
        ConfigurationError: something isn't a metric.
    """

    def __init__(self, metrics: Any, argument: str) -> None:
        self.argument = argument
        self._weighted = argument == "weighted_metrics"
        self._given = self._checked(metrics)

    def __bool__(self) -> bool:
        return bool(self._given)

    def for_unnamed_output(self) -> list[MetricSpec]:
        """Return the metrics of a net with a single output; none if they are for several."""
        return self._for_single(SINGLE) or []

    def for_several(self) -> bool:
        """Whether they can't be those of a net with a single output."""
        return self._for_single(SINGLE) is None

    def for_outputs(
        self, outputs: Outputs, targets: Mapping[Any, Any]
    ) -> dict[Any, list[MetricSpec]]:
        """Return the metrics of each output.

        Metrics given for several outputs apply to those of them that have targets. A function given
        for a structure of outputs gets all of them. So do the metrics of a structure with one
        target.

        Args:
            outputs: the net's outputs.
            targets: the existing targets, by the names of outputs and of their structures.

        Raises:
            ConfigurationError: a key isn't an output, the number of lists isn't that of the
                outputs, or an output with metrics has no target.
        """
        names = outputs.names
        is_by_name = isinstance(self._given, dict) and set(self._given) <= set(outputs.below(None))
        if len(names) == 1 and not is_by_name:
            single = self._for_single(names[0])
            if single is not None:
                return {names[0]: single}
        given = by_output(self._given, outputs, self.argument, spreads=True, entries="lists")
        found: dict[Any, list[MetricSpec]] = {}

        def add(name: Any, around: Any) -> None:
            """Add an output's metrics, which may be those of the structure `around` it."""
            its_own = given.get(name)
            of = around if its_own is given.get(around) else name
            if name is None or any(child in targets for child in outputs.below(name)):
                for child in outputs.within[name].values():
                    add(child, of)
                if name is None or of != name or not isinstance(its_own, _Listed):
                    return
                specs = [spec for spec in its_own.specs if _is_function(spec.metric)]
            else:
                specs = self._entries(its_own)
                if of not in (name, None):  # the structure around it gets the functions
                    specs = [spec for spec in specs if not _is_function(spec.metric)]
            if name in targets:
                found[name] = specs
            elif specs and of == name:
                raise ConfigurationError(
                    f"{self.argument} were given for the output {name!r}, but the targets are "
                    f"those of {[one for one in targets if one in names]}."
                )

        root = None if None in outputs.within else SINGLE
        add(root, root)
        return found

    def _for_single(self, output: Hashable) -> list[MetricSpec] | None:
        """Return the metrics of a single output; None if they were given for several."""
        given = self._given
        if isinstance(given, list):
            return self._entries(given[0]) if len(given) == 1 else None
        if isinstance(given, dict) and not all(map(_is_one, given.values())):
            is_wrapped = len(given) == 1 and output == SINGLE
            return self._entries(next(iter(given.values()))) if is_wrapped else None
        return self._entries(given)

    def _entries(self, given: Any) -> list[MetricSpec]:
        """Return the metrics of one output, from what was given for it."""
        if isinstance(given, _Listed):
            return given.specs
        if isinstance(given, dict) and all(map(_is_one, given.values())):
            return [spec for name, one in given.items() for spec in _renamed(one.specs, str(name))]
        if not given:
            return []
        raise ConfigurationError(
            f"{self.argument} has a {type(given).__name__} of {len(given)} groups of metrics, but "
            "the net has one output there. Give a metric, a list of them, or a dict by names that "
            "you choose."
        )

    def _checked(self, given: Any, *, is_top: bool = True) -> Any:
        """Return the given lists and dicts, with `_Listed` for metrics and lists of them."""
        if given is None:
            return None
        if isinstance(given, Mapping):
            for key in given:
                # A net may name its outputs by numbers, too.
                if key in (None, "") or not (is_top or isinstance(key, str)):
                    raise ArgumentTypeError(
                        f"{self.argument} has the key {describe(key)}: keys are names of outputs "
                        "or of metrics."
                    )
            return {key: self._checked(value, is_top=False) for key, value in given.items()}
        if not isinstance(given, (list, tuple)):
            return _Listed(list(self._metric(given)), is_one=True)
        if any(item is None or isinstance(item, (list, tuple, Mapping)) for item in given):
            return [self._checked(item, is_top=False) for item in given]
        return _Listed([spec for item in given for spec in self._metric(item)])

    def _metric(self, metric: Any) -> Iterator[MetricSpec]:
        if is_torchmetric(metric, "MetricCollection"):
            for name, part in metric.items():
                self._check(part)
                yield MetricSpec(name, part, self._weighted)
            return
        if isinstance(metric, str):
            yield from self._called(metric)
            return
        if isinstance(metric, MetricSpec):
            yield dataclasses.replace(metric, weighted=self._weighted)
            return
        self._check(metric)
        yield MetricSpec(_default_name(metric), metric, self._weighted)

    def _called(self, name: str) -> list[MetricSpec]:
        """Return the metric of a name, which may stand for what could be given as an object."""
        named = NAMES[name]
        if not isinstance(named, Named):
            return _renamed(list(self._metric(_made(name, named))), name.strip())
        if self._weighted and not named.weightable:
            raise self._not_weightable(repr(name))
        is_own = getattr(named.build, "__module__", "").startswith("fitkit.")
        return [MetricSpec(name.strip(), name if is_own else named, self._weighted)]

    def _check(self, metric: Any) -> None:
        if isinstance(metric, type):
            raise ArgumentTypeError(
                f"{self.argument} has the class {metric.__name__}: add () to make an object of it."
            )
        elif is_torchmetric(metric):
            if self._weighted:
                raise self._not_weightable(type(metric).__name__)
            refuse_aggregation(metric, self.argument)
        elif callable(metric) and _collects(metric):
            raise ConfigurationError(
                f"{self.argument} has {type(metric).__name__}, which collects batches itself. "
                "fitkit can't join what several processes collected by it. Give a torchmetrics "
                "object, or a function (prediction, target) that returns one value per sample."
            )
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
            "give one value per sample."
        )


def _made(name: str, metric: Callable[..., Any]) -> Any:
    """Return the metric that a name stands for: an object of it, if it is a class."""
    if not isinstance(metric, type):
        return metric
    try:
        return metric()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"metric={name!r} is registered as the class {metric.__name__}, which can't be made "
            f"without arguments ({error}). Register an object of it."
        ) from error


def _collects(metric: Any) -> bool:
    """Whether an object has another library's protocol: it is called with batches, and asked for
    a result at the end, until it is reset."""
    resets, results = ("reset", "reset_state", "reset_states"), ("aggregate", "compute", "result")
    return any(
        all(callable(getattr(metric, name, None)) for name in pair)
        for pair in itertools.product(resets, results)
    )


def _default_name(metric: Any) -> str:
    if is_torchmetric(metric):
        return snake_case(type(metric).__name__)
    return callable_name(metric)


def _renamed(entries: list[MetricSpec], name: str) -> list[MetricSpec]:
    # The metrics of a collection keep their own names behind the chosen one.
    if len(entries) == 1:
        return [dataclasses.replace(entries[0], name=name)]
    return [dataclasses.replace(entry, name=f"{name}_{entry.name}") for entry in entries]


def _is_one(given: Any) -> bool:
    return isinstance(given, _Listed) and given.is_one


def _is_function(metric: Any) -> bool:
    return not isinstance(metric, (str, Named)) and not is_torchmetric(metric)


def by_log_name(specs: Mapping[Any, Iterable[MetricSpec]]) -> dict[Any, dict[str, MetricSpec]]:
    """Each output's metrics by their names in the logs, chosen as in Keras.

    The second `mae` becomes `mae_1`. A weighted metric with the name of a plain one becomes
    `weighted_mae`. `loss` is reserved: a metric of that name becomes `loss_1`.

    Args:
        specs: the metrics of each output, including outputs without any.
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
