"""The metrics that compile was given, summed up over the batches of a call: a group an output."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError, FitkitError
from fitkit.metrics.buffer import Buffer
from fitkit.metrics.conversions import AsGiven, FirstBatch, Shifted
from fitkit.metrics.named import NAMES
from fitkit.metrics.specs import LogKeys, MetricSpec, Specs
from fitkit.metrics.sums import Batch, CallableMean, Mean, State, Values, changeable
from fitkit.metrics.torchmetrics_adapter import (
    TorchMetric,
    is_torchmetric,
    share_states,
    wrap_object,
)
from fitkit.outputs import SINGLE, LossHint, by_output, named_outputs
from fitkit.trees import leaves


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
        keys = LogKeys([SINGLE])
        return [
            keys.key(SINGLE, spec.name, weighted=spec.weighted)
            for specs in self._given
            for spec in specs.for_unnamed_output()
        ]

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
            hint: tells of each output what its loss knows.
            trained: the outputs that have a loss; targets may be those of them alone.

        Raises:
            ConfigurationError: metrics that don't fit the outputs, or an output of which no
                task can be told.
        """
        if self._groups is not None:
            return
        outputs: dict[Any, Any] = named_outputs(prediction)
        self._trained = trained
        targets = _targets(target, list(outputs), trained)
        keys = LogKeys(outputs)
        given = [(specs, specs.for_outputs(list(outputs))) for specs in self._given]
        groups: dict[Hashable, OutputGroup] = {}
        for output in outputs:
            found = [
                spec
                for specs, specs_of in given
                if specs_of[output] and _has_target(specs, output, targets)
                for spec in specs_of[output]
            ]
            if found:
                named = {keys.key(output, s.name, weighted=s.weighted): s for s in found}
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
        targets = _targets(target, names, self._trained)
        weights = {} if weight is None else _weights(weight, names, self._trained)
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
        """Forget all samples; what the first batch told stays."""
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


def _targets(target: Any, outputs: list[Any], trained: Sequence[Any]) -> dict[Any, Any]:
    """The targets by output; a net of one named output takes them without its name too."""
    if len(outputs) == 1 and isinstance(target, Tensor):
        return {outputs[0]: target}
    if len(trained) == 1 and isinstance(target, Tensor):
        return {trained[0]: target}
    return by_output(target, outputs, "target", trained)


def _weights(weight: Any, outputs: list[Any], trained: Sequence[Any]) -> dict[Any, Any]:
    """The sample weights by output; one tensor counts for all."""
    if isinstance(weight, Tensor):
        return dict.fromkeys(outputs, weight)
    return by_output(weight, outputs, "sample_weight", trained)


class OutputGroup:
    """The metrics of one output.

    Args:
        specs: the metrics by their final names.
        first: the output's first batch, by which they are built.

    Attributes:
        sums: what sums up each metric, by name.
        sees_each: whether some metric sees each batch as it came.
    """

    def __init__(self, specs: dict[str, MetricSpec], first: FirstBatch) -> None:
        self.sums: dict[str, Mean | TorchMetric] = {}
        for name, spec in specs.items():
            with _naming(name):
                self.sums[name] = _build(spec, first)
        share_states(self.sums.values())
        self._each = {name: one for name, one in self.sums.items() if not one.joins}
        self._joined = {name: one for name, one in self.sums.items() if one.joins}
        self.sees_each = bool(self._each)
        self._loss: Mean | None = None
        self._needs_weight = any(one.weighted for one in self._joined.values())
        self._buffer = Buffer(keeps=any(one.keeps_batches for one in self._joined.values()))
        self._is_first = True
        self._is_up_to_date = False

    def update(self, prediction: Any, target: Any, weight: Tensor | None) -> None:
        """Add a batch; its gradients don't count."""
        if self._each:
            self._count(self._each, Batch(prediction, target, weight))
        if self._joined:
            weight = weight if self._needs_weight else None
            for batch in self._buffer.add(prediction, target, weight):
                self._count(self._joined, batch)
        if self._is_first:
            self.flush()  # so that what can't work fails here, by its name
            self._is_first = False

    def flush(self) -> None:
        """Count the batches that wait."""
        for batch in self._buffer.take():
            self._count(self._joined, batch)

    def _count(self, sums: Mapping[str, Mean | TorchMetric], batch: Batch) -> None:
        for name, one in sums.items():
            with _naming(name) if self._is_first else contextlib.nullcontext():
                one.update(batch)

    def join_loss(self, values: Values, device: torch.device) -> None:
        """Let the losses of later batches be computed with the metrics, of many at once.

        Args:
            values: gives each sample's loss (N,); `loss_sums` has their sum, until `reset`.
            device: where they are.
        """
        self.flush()
        self._loss = self._joined["loss"] = Mean(AsGiven(), values, device)

    def loss_sums(self) -> tuple[float, float]:
        """The sum of the losses that were joined, and their number."""
        if self._loss is None:
            return 0.0, 0
        with self.up_to_date():
            total, samples = self._loss.summed().tolist()
        return total, samples

    @contextlib.contextmanager
    def up_to_date(self) -> Iterator[None]:
        """Meanwhile the sums count what waits too.

        A sum of fractions depends in its last digits on which batches are joined; that must
        not depend on who reads values when, as a progress bar does by the clock. So reading
        changes nothing, but where it can't matter.
        """
        sums = self._joined.values()
        if not self._buffer or self._is_up_to_date:
            yield
        elif all(one.is_exact for one in sums):
            self.flush()
            yield
        else:
            restores = [one.snapshot() for one in sums]
            self._is_up_to_date = True
            try:
                self._count(self._joined, self._buffer.joined())
                yield
            finally:
                self._is_up_to_date = False
                for restore in restores:
                    restore()

    def results(self) -> Iterator[tuple[str, Any]]:
        """Each metric's value over all samples so far, as it is logged."""
        with self.up_to_date(), changeable():
            values = [(name, one.result()) for name, one in self.sums.items() if one.updated]
        for name, value in values:
            yield from _logged(name, value)

    def states(self) -> dict[str, State]:
        """What was summed up for each metric, as plain data."""
        with self.up_to_date():
            return {name: one.state() for name, one in self.sums.items()}

    def load_merged(self, states: list[dict[str, State]]) -> None:
        """Take the sums of all ranks in place of this rank's own, from the `states` of each."""
        self._buffer.clear()
        for name, one in self.sums.items():
            one.load_merged([state[name] for state in states])

    def reset(self) -> None:
        """Forget all samples."""
        self._buffer.clear()
        if self._loss is not None:
            del self._joined["loss"]
            self._loss = None
        for one in self.sums.values():
            one.reset()


def _build(spec: MetricSpec, first: FirstBatch) -> Mean | TorchMetric:
    device = _device(first.given[0])
    one: Mean | TorchMetric
    if isinstance(spec.metric, str):
        one = NAMES[spec.metric].build(first)
    elif is_torchmetric(spec.metric):
        one = wrap_object(spec.metric, first)
    else:
        one = CallableMean(spec.metric, device)
    if first.hint.is_shifted and one.conversion is not None:
        one.conversion = Shifted(one.conversion)
    if one.joins:
        first.check_tensors()  # such batches wait and are joined
    if isinstance(one, Mean):
        one.weighted = spec.weighted
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
    if isinstance(result, (tuple, list)):
        return tuple(_plain(item) for item in result)
    if not isinstance(result, Tensor) or result.numel() == 1:
        return float(result)
    result = result.detach().cpu()
    return (result.float() if result.dtype == torch.bfloat16 else result).numpy()


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
