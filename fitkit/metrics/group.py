"""The metrics of one call of fit or evaluate, a group for each output, summed up over batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError, FitkitError
from fitkit.metrics.buffer import Buffer
from fitkit.metrics.conversions import AsGiven, FirstBatch, Shifted
from fitkit.metrics.merging import State, load_merged, state_of
from fitkit.metrics.named import NAMES
from fitkit.metrics.specs import LogKeys, MetricSpec, Specs
from fitkit.metrics.sums import Batch, Call, Mean, Totals
from fitkit.metrics.torchmetrics_adapter import (
    Each,
    Joined,
    is_torchmetric,
    share_states,
    wrap_object,
)
from fitkit.outputs import SINGLE, LossHint, by_output, named_outputs
from fitkit.trees import leaves, sample_count


class Meters:
    """Sums up the metrics of one call of fit or evaluate.

    All values are over the samples of this process.

    Args:
        given: what compile was given.
    """

    def __init__(self, given: Iterable[Specs]) -> None:
        self._given = [one for one in given if one]
        self._outputs: dict[Hashable, OutputGroup] | None = None
        self._only: OutputGroup | None = None

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
        started: dict[Hashable, OutputGroup] = {}
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
                    started[output] = OutputGroup(entries, first)
        self._outputs = started
        if len(outputs) == 1:
            self._only = next(iter(started.values()), None)

    @property
    def of_one(self) -> OutputGroup | None:
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

    def _started(self) -> Iterable[OutputGroup]:
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


def _has_target(given: Specs, output: Hashable, targets: Mapping[Any, Any]) -> bool:
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
        self._given = (Specs(metrics, "metrics"), Specs(weighted_metrics, "weighted_metrics"))

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


class OutputGroup:
    """The metrics of one output.

    Args:
        entries: the metrics by their final names.
        first: the output's first batch, by which they are built.

    Attributes:
        sums: what sums up each metric, by name.
    """

    def __init__(self, entries: dict[str, MetricSpec], first: FirstBatch) -> None:
        self.sums: dict[str, Mean | Call | Joined | Each] = {}
        for name, entry in entries.items():
            with _naming(name):
                self.sums[name] = _build(entry, first)
        share_states(self.sums.values())
        self._joining = {n: g for n, g in self.sums.items() if isinstance(g, (Mean, Joined))}
        self._seeing_each = {n: g for n, g in self.sums.items() if isinstance(g, (Call, Each))}
        self._needs_weight = any(g.weighted for g in self._joining.values())
        self._buffer = Buffer(keeps=any(g.keeps_batches for g in self._joining.values()))
        self._aside: list[Mean] = []
        self._is_up_to_date = False
        self._is_first = True

    @property
    def sees_each(self) -> bool:
        """Whether some metric sees each batch as it came."""
        return bool(self._seeing_each)

    def update(self, prediction: Any, target: Any, weight: Tensor | None) -> None:
        """Add a batch; its gradients don't count."""
        if self._is_first:
            with torch.no_grad():
                self._update_first(prediction, target, weight)
        else:
            self.update_more(prediction, target, weight)

    def update_more(self, prediction: Any, target: Any, weight: Tensor | None) -> None:
        """Add a batch that isn't the first."""
        if self._seeing_each:
            with torch.no_grad():
                for one in self._seeing_each.values():
                    one.see(prediction, target, weight, sample_count(prediction))
        if (self._joining or self._aside) and self._buffer.add(
            prediction, target, weight if self._needs_weight else None
        ):
            self._add(self._buffer.take())

    def _update_first(self, prediction: Any, target: Any, weight: Tensor | None) -> None:
        """Add the first batch at once, so that what can't work fails here, by its name."""
        for name, each in self._seeing_each.items():
            with _naming(name):
                each.see(prediction, target, weight, sample_count(prediction))
        if self._joining:
            self._buffer.add(prediction, target, weight if self._needs_weight else None)
        with _changeable():
            for batch in self._buffer.take():
                for name, joined in self._joining.items():
                    with _naming(name):
                        joined.update(batch)
        self._is_first = False

    def also(self, values: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Totals:
        """Let a mean be made of later batches that isn't among the results; until `reset`.

        Args:
            values: gives one value a sample (N,).
            device: where they are.

        Returns:
            Its sums, which are whole once the batches that wait are counted (`up_to_date`).
        """
        self.settle()
        one = Mean(AsGiven(), values, device)
        self._aside.append(one)
        return one.totals

    def settle(self) -> None:
        """Count the batches that wait."""
        if self._buffer:
            self._add(self._buffer.take())

    def _joined_gauges(self) -> list[Mean | Joined]:
        return [*self._joining.values(), *self._aside]

    def _add(self, batches: Iterable[Batch]) -> None:
        with _changeable():
            for batch in batches:
                for one in self._joined_gauges():
                    one.update(batch)

    @contextlib.contextmanager
    def up_to_date(self) -> Iterator[None]:
        """Meanwhile the sums count what waits too.

        A sum of fractions depends in its last digits on which batches are joined; that must
        not depend on who reads values when, as a progress bar does by the clock. So conversion
        changes nothing, but where it can't matter.
        """
        sums = self._joined_gauges()
        if not self._buffer or self._is_up_to_date:
            yield
        elif all(one.is_exact for one in sums):
            self._add(self._buffer.take())
            yield
        else:
            ways_back = [one.bookmark() for one in sums]
            self._is_up_to_date = True
            try:
                self._add(self._buffer.joined())
                yield
            finally:
                self._is_up_to_date = False
                for back in ways_back:
                    back()

    def results(self) -> Iterator[tuple[str, Any]]:
        """Each metric's value over all samples so far, as it is logged."""
        with self.up_to_date(), _changeable():
            values = [(name, g.result()) for name, g in self.sums.items() if g.updated]
        for name, value in values:
            yield from _logged(name, value)

    def states(self) -> dict[str, State]:
        """What each one has summed up, as plain data."""
        with self.up_to_date():
            return {name: state_of(one) for name, one in self.sums.items()}

    def load_merged(self, states: list[dict[str, State]]) -> None:
        """Take the sums of all ranks in place of this rank's own.

        Args:
            states: each rank's `states`.
        """
        self._buffer.clear()
        for name, one in self.sums.items():
            load_merged(one, [state[name] for state in states])

    def reset(self) -> None:
        """Forget all samples."""
        self._buffer.clear()
        self._aside.clear()
        with _changeable():
            for one in self.sums.values():
                one.reset()


def _build(entry: MetricSpec, first: FirstBatch) -> Mean | Call | Joined | Each:
    device = _device(first.given[0])
    one: Mean | Call | Joined | Each
    if isinstance(entry.metric, str):
        one = NAMES[entry.metric].build(first)
    elif is_torchmetric(entry.metric):
        one = wrap_object(entry.metric, first)
    else:
        one = Call(entry.metric, device)
    if first.hint.is_shifted and not isinstance(one, Call) and one.conversion is not None:
        one.conversion = Shifted(one.conversion)
    if isinstance(one, (Mean, Joined)):
        first.check_tensors()  # such batches wait and are joined
    if isinstance(one, (Mean, Call)):
        one.weighted = entry.weighted
    one.to(device)
    return one


def _device(prediction: Any) -> torch.device:
    tensors = (leaf.device for leaf in leaves(prediction) if isinstance(leaf, Tensor))
    return next(tensors, torch.device("cpu"))


def _logged(name: str, result: Any) -> Iterator[tuple[str, Any]]:
    """A result as floats and arrays; a dict as one entry a key."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from _logged(f"{name}_{key}", value)
    else:
        yield name, _plain(result)


def _plain(result: Any) -> Any:
    if isinstance(result, Tensor):
        return float(result) if result.numel() == 1 else _array(result)
    if isinstance(result, (tuple, list)):
        return tuple(_plain(item) for item in result)
    return float(result)


def _array(result: Tensor) -> Any:
    result = result.detach().cpu()
    return (result.float() if result.dtype == torch.bfloat16 else result).numpy()


@contextlib.contextmanager
def _changeable() -> Iterator[None]:
    """Out of inference mode, in which states would become tensors that can't be changed later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let what fails on the first batch name its metric."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except ConfigurationError as error:
        raise ConfigurationError(f"metric {name!r}: {error}") from error
    except FitkitError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"metric {name!r} can't be computed of the first batch: {type(error).__name__}: {error}"
        ) from error
