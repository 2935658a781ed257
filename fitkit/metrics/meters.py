"""The metrics of one call of fit or evaluate, summed up over its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError
from fitkit.metrics.given import Given, LogKeys
from fitkit.metrics.merging import State
from fitkit.metrics.output import OutputMeters
from fitkit.metrics.task import FirstBatch
from fitkit.outputs import SINGLE, LossHint, by_output, named_outputs


class Meters:
    """Sums up the metrics of one call of fit or evaluate.

    All values are over the samples of this process.

    Args:
        given: what compile was given.
    """

    def __init__(self, given: Iterable[Given]) -> None:
        self._given = [one for one in given if one]
        self._outputs: dict[Hashable, OutputMeters] | None = None
        self._only: OutputMeters | None = None

    @property
    def has_metrics(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    @property
    def are_known(self) -> bool:
        """Whether none of them is code of the user's that sees each batch; after `start`."""
        return not any(meters.sees_each for meters in self._started())

    def start(self, prediction: Any, target: Any, hint: Callable[[Any], LossHint]) -> None:
        """Build the metrics by the first batch; later calls do nothing.

        Args:
            prediction: what the net gave.
            target: its targets.
            hint: tells of each output what its loss knows.

        Raises:
            ConfigurationError: metrics that don't fit the outputs, or an output of which no
                task can be told.
        """
        if self._outputs is not None:
            return
        outputs: dict[Any, Any] = named_outputs(prediction)
        targets = _targets(target, list(outputs))
        keys = LogKeys(outputs)
        given_to = [(given, given.for_outputs(list(outputs))) for given in self._given]
        started: dict[Hashable, OutputMeters] = {}
        for output in outputs:
            found = [
                entry
                for given, entries_of in given_to
                if entries_of[output] and _has_target(given, output, targets)
                for entry in entries_of[output]
            ]
            if found:
                entries = {keys.key(output, e.name, weighted=e.weighted): e for e in found}
                first = FirstBatch(outputs[output], targets[output], hint(output))
                with torch.inference_mode(False), torch.no_grad():
                    started[output] = OutputMeters(entries, first)
        self._outputs = started
        if len(outputs) == 1:
            self._only = next(iter(started.values()), None)

    @property
    def of_one(self) -> OutputMeters | None:
        """Those of the net's one output; None before a first batch, and where it has several."""
        return self._only

    @contextlib.contextmanager
    def up_to_date(self) -> Iterator[None]:
        """Meanwhile all values count the batches that wait, which are joined once for them."""
        with contextlib.ExitStack() as stack:
            for meters in self._started():
                stack.enter_context(meters.up_to_date())
            yield

    def settle(self) -> None:
        """Count the batches that wait, now that no more come."""
        for meters in self._started():
            meters.settle()

    def update(self, prediction: Any, target: Any, weight: Any = None) -> None:
        """Add a batch; its gradients don't count.

        Args:
            prediction: what the net gave.
            target: its targets.
            weight: one weight a sample, or a dict or list of them by output; None: 1 each.
        """
        only = self._only
        if (
            only is not None
            and isinstance(prediction, Tensor)
            and isinstance(target, Tensor)
            and (weight is None or isinstance(weight, Tensor))
        ):
            only.update(prediction, target, weight)
        else:
            self._update_outputs(prediction, target, weight)

    def _update_outputs(self, prediction: Any, target: Any, weight: Any) -> None:
        if self._outputs is None:
            raise RuntimeError("Meters.update() came before Meters.start()")
        outputs: dict[Any, Any] = named_outputs(prediction)
        names = list(outputs)
        targets = _targets(target, names)
        weights = {} if weight is None else _weights(weight, names)
        for name, meters in self._outputs.items():
            meters.update(outputs[name], targets[name], weights.get(name))

    def results(self) -> dict[str, Any]:
        """The values over all samples so far, by name.

        Returns:
            Python floats; an array for a metric of several numbers; for a metric that gives a
            dict one entry a key, `<name>_<key>`. Metrics without samples are left out.
        """
        return dict(pair for meters in self._started() for pair in meters.results())

    def _started(self) -> Iterable[OutputMeters]:
        return () if self._outputs is None else self._outputs.values()

    def reset(self) -> None:
        """Forget all samples; what the first batch told stays."""
        for meters in self._started():
            meters.reset()

    def state(self) -> dict[str, State] | None:
        """What was summed up on this rank, as plain data by name; None before start."""
        if self._outputs is None:
            return None
        return {k: state for meters in self._started() for k, state in meters.states().items()}

    def merge(self, states: list[dict[str, State]]) -> None:
        """Take the sums of all ranks in place of this rank's own; `reset` ends that.

        Args:
            states: the `state` of each rank that has one.
        """
        for meters in self._started():
            meters.load_merged(states)


def _has_target(given: Given, output: Hashable, targets: Mapping[Any, Any]) -> bool:
    """Whether an output has targets; metrics for every output go to those that have."""
    if output not in targets and given.is_by_output:
        raise ConfigurationError(
            f"{given.argument} were given for the output {output!r}, but the targets are those of "
            f"{list(targets)}."
        )
    return output in targets


def _targets(target: Any, outputs: list[Any]) -> dict[Any, Any]:
    """The targets by output; a net of one named output takes them without its name too."""
    if len(outputs) == 1 and isinstance(target, Tensor):
        return {outputs[0]: target}
    return by_output(target, outputs, "target")


def _weights(weight: Any, outputs: list[Any]) -> dict[Any, Any]:
    """The sample weights by output; one tensor counts for all."""
    if isinstance(weight, Tensor):
        return dict.fromkeys(outputs, weight)
    return by_output(weight, outputs, "sample_weight")


class CompiledMetrics:
    """The metrics that compile was given, checked at once.

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
    """

    def __init__(self, metrics: Any = None, weighted_metrics: Any = None) -> None:
        self._given = (Given(metrics, "metrics"), Given(weighted_metrics, "weighted_metrics"))

    def meters(self) -> Meters:
        """A fresh set of sums, for one call of fit or evaluate.

        The user's torchmetrics objects are copied, so that calls can nest; the objects
        themselves stay as they are.
        """
        return Meters(self._given)

    @property
    def known_names(self) -> list[str]:
        """The names logged by a net with a single output, as far as they are known by now."""
        keys = LogKeys([SINGLE])
        return [
            keys.key(SINGLE, entry.name, weighted=entry.weighted)
            for given in self._given
            for entry in given.for_unnamed_output()
        ]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(self._given)
