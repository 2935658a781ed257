"""The metrics of one output: built from its first batch, and fed with joined batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError, FitkitError
from fitkit.metrics.conversions import FirstBatch, as_given, next_places
from fitkit.metrics.named import NAMES, Named
from fitkit.metrics.sums import CallableMean, Mean, MetricBatch, State, Values, changeable
from fitkit.metrics.torchmetrics_adapter import is_torchmetric, wrap_object
from fitkit.shortcuts import Shortcut
from fitkit.trees import tensors

if TYPE_CHECKING:
    from fitkit.extras.torchmetrics_objects import TorchMetric

MOST_BATCHES = 256
"""The most batches to join. An update of torchmetrics then costs 2 µs per batch, not 80."""
MOST_ELEMENTS = 2**16
"""The most waiting numbers, predictions and targets: 0.25 MB in float32, which caches hold."""
GROWTH = 8
"""The size of a block relative to the one before: few blocks are joined, and copied for it."""
LARGE = 2**15
"""Batches with more numbers don't wait: copying them takes longer than joining saves."""

BATCHES_WAIT = Shortcut("metrics of several batches at once")

NOTHING = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class MetricSpec:
    """One metric and its name, which another metric may have too.

    Attributes:
        name: what it is called.
        metric: a name of fitkit's own, which every process has; else what a name stands for, or an
            object.
        weighted: whether sample weights weigh it.
    """

    name: str
    metric: Any
    weighted: bool


class OutputGroup:
    """The metrics of one output.

    Args:
        specs: the metrics by their final names.
        first: the output's first batch, from which they are built.
        waits: whether batches may wait for others. False if values are read after each.

    Attributes:
        sums: the sums of each metric, by name.
        sees_each: whether some metric sees each batch as it came.
    """

    def __init__(
        self, specs: dict[str, MetricSpec], first: FirstBatch, *, waits: bool = True
    ) -> None:
        self._waits = waits and BATCHES_WAIT.is_on
        self.sums: dict[str, Mean | TorchMetric] = {}
        for name, spec in specs.items():
            with _naming(name):
                self.sums[name] = _build(spec, first)
        self._each = {name: one for name, one in self.sums.items() if not one.joins}
        self._joined = {name: one for name, one in self.sums.items() if one.joins}
        self._has_means_only = all(isinstance(one, Mean) for one in self.sums.values())
        self.sees_each: bool = bool(self._each)
        self._loss: Mean | None = None
        self._needs_weight = any(one.weighted for one in self._joined.values())
        self._buffer = Buffer(keeps=any(one.keeps_batches for one in self._joined.values()))
        self._later = first.later if self._joined else None
        self._is_first = True
        self._is_up_to_date = False

    def add(self, name: str, sums: Mean) -> None:
        """Add further sums of what this output gets, before its first batch."""
        self.sums[name] = sums
        (self._joined if sums.joins else self._each)[name] = sums
        self.sees_each = bool(self._each)
        self._needs_weight = self._needs_weight or sums.weighted

    def update(self, prediction: Any, target: Any, weight: Tensor | None) -> None:
        """Add a batch, without gradients."""
        if self._joined:  # before the user's code, which may write into predictions
            used = weight if self._needs_weight else None
            ready: Sequence[MetricBatch] = (
                self._buffer.add(prediction, target, used)
                if self._waits
                else [MetricBatch(prediction.detach(), target.detach(), used)]
            )
            for batch in ready:
                self._count(self._joined, batch)
        if self._each:
            self._count(self._each, MetricBatch(prediction, target, weight))
        if self._is_first:
            self.flush()  # so that an error is raised here, with the metric's name
            self._is_first = False

    def flush(self) -> None:
        """Count the waiting batches."""
        for batch in self._buffer.take():
            self._count(self._joined, batch)
        if self._later is not None and self._later.kept:
            self._later.finish()

    def _count(self, sums: Mapping[str, Mean | TorchMetric], batch: MetricBatch) -> None:
        if self._later is not None and not self._is_first and sums is self._joined:
            self._later.check(batch.prediction, batch.target)
        if self._has_means_only and not self._is_first:
            for one in sums.values():
                one.update(batch)
            return
        with changeable():
            for name, one in sums.items():
                with _naming(name) if self._is_first else NOTHING:
                    one.update(batch)

    def join_loss(self, values: Values, device: torch.device) -> None:
        """Compute the losses of later batches together with the metrics, many at once.

        Args:
            values: a function that returns each sample's loss (N,). `loss_sums` has their sum,
                until `reset`.
            device: the device of the losses.
        """
        self.flush()
        self._loss = self._joined["loss"] = Mean(as_given, values)
        self._loss.to(device)

    @property
    def joins_losses(self) -> bool:
        """Whether losses are computed here, because `join_loss` was called in this pass."""
        return self._loss is not None

    def loss_sums(self) -> tuple[float, float]:
        """Return the sum of the losses that were joined, and their number."""
        if self._loss is None:
            return 0.0, 0
        with self.up_to_date():
            total, samples = self._loss.summed().tolist()
        return total, samples

    def up_to_date(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, the sums include the waiting batches.

        The last digits of a sum of fractions depend on which batches are joined. They must not
        depend on when someone reads values, such as a progress bar by the clock. So reading leaves
        the sums as they are, unless they are exact.
        """
        if self._buffer and not self._is_up_to_date:
            if not all(one.is_exact for one in self._joined.values()):
                return self._counting_what_waits()
            self.flush()
        return NOTHING

    @contextlib.contextmanager
    def _counting_what_waits(self) -> Iterator[None]:
        restores = [one.snapshot() for one in self._joined.values()]
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
        with self.up_to_date(), NOTHING if self._has_means_only else changeable():
            values = [(name, one.result()) for name, one in self.sums.items() if one.updated]
        for name, value in values:
            if type(value) is float:
                yield name, value
            else:
                yield from _logged(name, value)

    def states(self) -> dict[str, State]:
        """Return the sums of each metric, as plain data."""
        with self.up_to_date():
            return {name: one.state() for name, one in self.sums.items()}

    def load_merged(self, states: list[dict[str, State]]) -> None:
        """Replace this rank's own sums by those of all ranks, from the `states` of each."""
        self._buffer.clear()
        for name, one in self.sums.items():
            one.load_merged([state[name] for state in states])

    def reset(self) -> None:
        """Forget all samples."""
        if self._buffer:
            self._buffer.clear()
        if self._loss is not None:
            del self._joined["loss"]
            self._loss = None
        for one in self.sums.values():
            one.reset()


def _build(spec: MetricSpec, first: FirstBatch) -> Mean | TorchMetric:
    one: Mean | TorchMetric
    metric: Any = NAMES[spec.metric] if isinstance(spec.metric, str) else spec.metric
    if isinstance(metric, Named):
        one = metric.build(first)
    elif is_torchmetric(metric):
        one = wrap_object(metric, first)
    else:
        one = CallableMean(metric)
    if first.hint.is_shifted and one.conversion is not None:
        one.conversion = next_places(one.conversion)
    if one.joins:
        first.check_tensors()  # such batches wait and are joined
    if isinstance(one, Mean):
        one.weighted = spec.weighted
    devices = [tensor.device for tensor in tensors(first.given[0])]
    one.to(devices[0] if devices else torch.device("cpu"))
    return one


def _logged(name: str, result: Any) -> Iterator[tuple[str, Any]]:
    """Yield a result as floats and arrays. A dict becomes one entry per key."""
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
    """Add the metric's name to an error on the first batch."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ConfigurationError as error:
        raise ConfigurationError(f"metric {name!r}: {error}") from error
    except FitkitError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"metric {name!r} can't be computed of the first batch: {type(error).__name__}: {error}"
        ) from error


class Buffer:
    """Predictions, targets and weights that wait until there are enough of them.

    Waiting batches are copied, because their memory may change. A generator may reuse its own
    buffers (even through NumPy, which torch doesn't see). A net may return its input. And a net
    compiled with `mode="reduce-overhead"` overwrites its outputs. Large batches don't wait and
    aren't copied.

    Batches of one shape are copied into a block, a piece of memory that is reused. A new tensor
    would take twice as long as a copy, and joining a block needs no further copy.

    Args:
        keeps: whether a metric keeps what it gets, which then needs its own memory.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kind: Any = None  # what joined batches have in common
        self._like: Any = None  # the shapes and types of the block's batches
        self._block: tuple[Tensor, Tensor] | None = None
        self._places: Sequence[tuple[Tensor, Tensor]] = ()  # each batch's part of the block
        self._capacity = self._used = 0  # how many there are, and how many are used
        self._size = 0  # how many numbers one of them has
        self._full: list[tuple[Tensor, Tensor]] = []  # blocks before this one
        self._weights: list[Tensor] = []
        self._waiting = self._elements = 0

    def __bool__(self) -> bool:
        """Whether any batch waits."""
        return self._waiting > 0

    def add(
        self, prediction: Tensor, target: Tensor, weight: Tensor | None
    ) -> Sequence[MetricBatch]:
        """Let a batch wait, without its gradients.

        Returns:
            The batches to count now, before the next `add` reuses their memory.
        """
        ready: Sequence[MetricBatch] = ()
        like = (
            prediction.shape, target.shape, prediction.dtype, target.dtype,
            None if weight is None else weight.shape,
        )  # fmt: skip
        if like != self._like or self._used == self._capacity:
            if prediction.numel() + target.numel() > LARGE:
                return *self.take(), self._large(prediction, target, weight)
            ready = self._begin_block(prediction, target, like)
        to_prediction, to_target = self._places[self._used]
        # Checking requires_grad costs a tenth of detaching.
        to_prediction.copy_(prediction.detach() if prediction.requires_grad else prediction)
        to_target.copy_(target.detach() if target.requires_grad else target)
        if weight is not None:
            self._weights.append(torch.atleast_1d(weight.detach()).clone())
        self._used += 1
        self._waiting += 1
        self._elements += self._size
        if self._waiting >= MOST_BATCHES or self._elements >= MOST_ELEMENTS:
            return *ready, *self.take()
        return ready

    def _large(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> MetricBatch:
        prediction, target = prediction.detach(), target.detach().to(prediction.device)
        if self._keeps:
            prediction, target = prediction.clone(), target.clone()
        return MetricBatch(prediction, target, weight)

    def _begin_block(self, prediction: Tensor, target: Tensor, like: Any) -> Sequence[MetricBatch]:
        """Make an empty block, larger than the last if that was for this batch's shape.

        So batches whose shapes keep changing take no more memory than their own.

        Returns:
            The batches to count, because they can't be joined with such a batch.
        """
        shape, target_shape = prediction.shape or (1,), target.shape or (1,)
        weights = like[4]
        kind = (
            len(shape), shape[1:], len(target_shape), target_shape[1:],
            None if weights is None else (len(weights), weights[1:]),
        )  # fmt: skip
        ready: Sequence[MetricBatch] = ()
        if kind != self._kind:
            ready, self._kind = self.take(), kind
        elif self._used:
            self._full.append(self._used_part())
        self._size = prediction.numel() + target.numel()
        most = -(-MOST_ELEMENTS // max(self._size, 1))
        capacity = min(GROWTH * self._capacity if like == self._like else 1, most, MOST_BATCHES)
        with torch.inference_mode(False), torch.no_grad():
            # A tensor made in inference mode can't be written to outside of it.
            self._block = (
                prediction.new_empty((capacity, *shape)),
                target.new_empty((capacity, *target_shape), device=prediction.device),
            )
            self._places = list(zip(*(part.unbind() for part in self._block), strict=True))
            self._capacity = capacity
        self._like, self._used = like, 0
        return ready

    def _used_part(self) -> tuple[Tensor, Tensor]:
        assert self._block is not None
        predictions, targets = (part[: self._used].flatten(0, 1) for part in self._block)
        return predictions, targets

    def joined(self) -> MetricBatch:
        """All waiting batches as one."""
        blocks = [*self._full, self._used_part()] if self._used else self._full
        predictions, targets = zip(*blocks, strict=True)
        weight = torch.cat(self._weights) if self._weights else None
        return MetricBatch(self._one(predictions), self._one(targets), weight)

    def _one(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].clone() if self._keeps else parts[0]

    def take(self) -> Sequence[MetricBatch]:
        """Take all waiting batches as one, if there are any."""
        batches = (self.joined(),) if self._waiting else ()
        self.clear()
        return batches

    def clear(self) -> None:
        """Forget all waiting batches. The last block is kept for the next ones."""
        self._full.clear()
        self._weights.clear()
        self._used = self._waiting = self._elements = 0
