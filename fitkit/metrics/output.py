"""The metrics of one output, summed up over its batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError, FitkitError
from fitkit.metrics.catalogue import NAMES
from fitkit.metrics.gauges import Batch, Call, Mean, Totals
from fitkit.metrics.given import Entry
from fitkit.metrics.merging import State, load_merged, state_of
from fitkit.metrics.readings import AsGiven, Shifted
from fitkit.metrics.task import FirstBatch
from fitkit.metrics.wrapped import Each, Joined, is_torchmetric, share_states, wrap_object
from fitkit.trees import leaves, sample_count


class OutputMeters:
    """The metrics of one output.

    Args:
        entries: the metrics by their final names.
        first: the output's first batch, by which they are built.

    Attributes:
        gauges: what sums up each metric, by name.
    """

    def __init__(self, entries: dict[str, Entry], first: FirstBatch) -> None:
        self.gauges: dict[str, Mean | Call | Joined | Each] = {}
        for name, entry in entries.items():
            with _naming(name):
                self.gauges[name] = _build(entry, first)
        share_states(self.gauges.values())
        self._joining = {n: g for n, g in self.gauges.items() if isinstance(g, (Mean, Joined))}
        self._seeing_each = {n: g for n, g in self.gauges.items() if isinstance(g, (Call, Each))}
        self._needs_weight = any(g.weighted for g in self._joining.values())
        self._pending = Pending(keeps=any(g.keeps_batches for g in self._joining.values()))
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
                for gauge in self._seeing_each.values():
                    gauge.see(prediction, target, weight, sample_count(prediction))
        if (self._joining or self._aside) and self._pending.add(
            prediction, target, weight if self._needs_weight else None
        ):
            self._add(self._pending.take())

    def _update_first(self, prediction: Any, target: Any, weight: Tensor | None) -> None:
        """Add the first batch at once, so that what can't work fails here, by its name."""
        for name, each in self._seeing_each.items():
            with _naming(name):
                each.see(prediction, target, weight, sample_count(prediction))
        if self._joining:
            self._pending.add(prediction, target, weight if self._needs_weight else None)
        with _changeable():
            for batch in self._pending.take():
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
        gauge = Mean(AsGiven(), values, device)
        self._aside.append(gauge)
        return gauge.totals

    def settle(self) -> None:
        """Count the batches that wait."""
        if self._pending:
            self._add(self._pending.take())

    def _joined_gauges(self) -> list[Mean | Joined]:
        return [*self._joining.values(), *self._aside]

    def _add(self, batches: Iterable[Batch]) -> None:
        with _changeable():
            for batch in batches:
                for gauge in self._joined_gauges():
                    gauge.update(batch)

    @contextlib.contextmanager
    def up_to_date(self) -> Iterator[None]:
        """Meanwhile the gauges count what waits too.

        A sum of fractions depends in its last digits on which batches are joined; that must
        not depend on who reads values when, as a progress bar does by the clock. So reading
        changes nothing, but where it can't matter.
        """
        gauges = self._joined_gauges()
        if not self._pending or self._is_up_to_date:
            yield
        elif all(gauge.is_exact for gauge in gauges):
            self._add(self._pending.take())
            yield
        else:
            ways_back = [gauge.bookmark() for gauge in gauges]
            self._is_up_to_date = True
            try:
                self._add(self._pending.joined())
                yield
            finally:
                self._is_up_to_date = False
                for back in ways_back:
                    back()

    def results(self) -> Iterator[tuple[str, Any]]:
        """Each metric's value over all samples so far, as it is logged."""
        with self.up_to_date(), _changeable():
            values = [(name, g.result()) for name, g in self.gauges.items() if g.updated]
        for name, value in values:
            yield from _logged(name, value)

    def states(self) -> dict[str, State]:
        """What each gauge has summed up, as plain data."""
        with self.up_to_date():
            return {name: state_of(gauge) for name, gauge in self.gauges.items()}

    def load_merged(self, states: list[dict[str, State]]) -> None:
        """Take the sums of all ranks in place of this rank's own.

        Args:
            states: each rank's `states`.
        """
        self._pending.clear()
        for name, gauge in self.gauges.items():
            load_merged(gauge, [state[name] for state in states])

    def reset(self) -> None:
        """Forget all samples."""
        self._pending.clear()
        self._aside.clear()
        with _changeable():
            for gauge in self.gauges.values():
                gauge.reset()


def _build(entry: Entry, first: FirstBatch) -> Mean | Call | Joined | Each:
    device = _device(first.given[0])
    gauge: Mean | Call | Joined | Each
    if isinstance(entry.metric, str):
        gauge = NAMES[entry.metric].build(first)
    elif is_torchmetric(entry.metric):
        gauge = wrap_object(entry.metric, first)
    else:
        gauge = Call(entry.metric, device)
    if first.hint.is_shifted and not isinstance(gauge, Call) and gauge.reading is not None:
        gauge.reading = Shifted(gauge.reading)
    if isinstance(gauge, (Mean, Joined)):
        first.check_tensors()  # such batches wait and are joined
    if isinstance(gauge, (Mean, Call)):
        gauge.weighted = entry.weighted
    gauge.to(device)
    return gauge


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


Parts: TypeAlias = tuple[Tensor, Tensor, "Tensor | None"]

MOST_BATCHES = 256
"""So many batches are joined at most; an update of torchmetrics then costs 2 µs a batch, not 80."""
MOST_ELEMENTS = 2**16
"""So many numbers wait at most, predictions and targets: 0.25 MB in float32, which caches hold."""
GROWTH = 8
"""A block is so many times as large as the one before: few blocks are joined, and copied for it."""
LARGE = 2**15
"""Batches of more numbers don't wait: to copy them takes longer than what joining saves."""


class _Block:
    """Memory for several batches of one shape, in one piece: joined without being copied again.

    It is used again and again, as a new tensor takes twice a copy's time.

    Attributes:
        size: how many numbers one batch has.
        kind: what blocks that are joined have in common.
        room: how many batches it can hold.
        used: how many it holds.
        predictions, targets: each batch's memory; of one dimension where the batch's have none.
        weights: each batch's weights; none where batches without weights fit.
    """

    __slots__ = (
        "_all_predictions",
        "_all_targets",
        "_dtype",
        "_shape",
        "_target_dtype",
        "_target_shape",
        "_weight_shape",
        "kind",
        "predictions",
        "room",
        "size",
        "targets",
        "used",
        "weights",
    )

    def __init__(
        self, prediction: Tensor, target: Tensor, weight: Tensor | None, room: int
    ) -> None:
        self._shape, self._target_shape = prediction.shape, target.shape
        self._dtype, self._target_dtype = prediction.dtype, target.dtype
        self._weight_shape = None if weight is None else weight.shape
        self.weights: list[Tensor] = []
        self.size = prediction.numel() + target.numel()
        self.room, self.used = room, 0
        with torch.inference_mode(False), torch.no_grad():
            # What is made in inference mode can't be written to outside of it.
            self._all_predictions = prediction.new_empty((room, *(prediction.shape or (1,))))
            self._all_targets = target.new_empty(
                (room, *(target.shape or (1,))), device=prediction.device
            )
            self.predictions = self._all_predictions.unbind()
            self.targets = self._all_targets.unbind()
        rows, target_rows = self._all_predictions, self._all_targets
        kind = rows.ndim, rows.shape[2:], target_rows.ndim, target_rows.shape[2:]
        self.kind = kind, None if weight is None else (weight.ndim, weight.shape[1:])

    def fits(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Whether a batch is of this block's shapes and types."""
        return (
            prediction.shape == self._shape
            and target.shape == self._target_shape
            and prediction.dtype is self._dtype
            and target.dtype is self._target_dtype
            and (None if weight is None else weight.shape) == self._weight_shape
        )

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Copy a batch, where it fits and there is room.

        Returns:
            Whether that is so.
        """
        index = self.used
        if index == self.room or not self.fits(prediction, target, weight):
            return False
        # Asking costs a tenth of detaching.
        self.predictions[index].copy_(
            prediction.detach() if prediction.requires_grad else prediction
        )
        self.targets[index].copy_(target.detach() if target.requires_grad else target)
        if weight is not None:
            self.weights.append(torch.atleast_1d(weight.detach()).clone())
        self.used = index + 1
        return True

    def joined(self) -> tuple[Tensor, Tensor]:
        """The predictions and the targets of all batches: the block's own memory."""
        used = self.used
        return self._all_predictions[:used].flatten(0, 1), self._all_targets[:used].flatten(0, 1)

    def clear(self) -> None:
        """Forget all batches."""
        self.used = 0
        self.weights.clear()


class Pending:
    """The predictions, targets and weights that no metric has seen yet.

    What waits is copied: a generator may refill its own buffers with the next batch (also
    through NumPy, of which torch sees nothing), a net may give its input, and one that is
    compiled with `mode="reduce-overhead"` overwrites its outputs. Large batches neither wait
    nor are copied.

    Args:
        keeps: whether what is taken stays with a metric, which then needs its own memory.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._blocks: list[_Block] = []
        self._spare: _Block | None = None
        self._waiting = 0
        self._elements = 0
        self._large: Parts | None = None

    def __bool__(self) -> bool:
        """Whether any wait."""
        return self._waiting > 0

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Let a batch wait, without its gradients.

        Returns:
            Whether it is time to take them all, at once: the last may not be a copy, and the
            memory of the others is that of the next.
        """
        block = self._blocks[-1] if self._blocks else None
        if block is None or not block.add(prediction, target, weight):
            if prediction.numel() + target.numel() > LARGE:
                self._large = prediction.detach(), target.detach(), weight
                return True
            block = self._next_block(prediction, target, weight)
            block.add(prediction, target, weight)
        self._waiting += 1
        self._elements += block.size
        return self._waiting >= MOST_BATCHES or self._elements >= MOST_ELEMENTS

    def _next_block(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> _Block:
        """An empty block that fits a batch: larger than the last, if that was of its shape.

        Batches whose shapes change from one to the next so take no more memory than their own.
        """
        last = self._blocks[-1] if self._blocks else None
        block, self._spare = self._spare, None
        if block is None or not block.fits(prediction, target, weight):
            grows = last is not None and last.fits(prediction, target, weight)
            most = -(-MOST_ELEMENTS // max(prediction.numel() + target.numel(), 1))
            room = min(GROWTH * last.room if last is not None and grows else 1, most, MOST_BATCHES)
            block = _Block(prediction, target, weight, room)
        self._blocks.append(block)
        return block

    def take(self) -> Iterator[Batch]:
        """All that wait, as `joined`, and forget them."""
        batches, large, keeps = list(self.joined()), self._large, self._keeps
        self.clear()
        yield from batches
        if large is not None:
            prediction, target, weight = large
            target = target.to(prediction.device)
            if keeps:
                prediction, target = prediction.clone(), target.clone()
            yield Batch(prediction, target, weight)

    def joined(self) -> Iterator[Batch]:
        """All that wait, joined where neighbours have the same shapes beyond dimension 0."""
        for _, neighbours in itertools.groupby(self._blocks, lambda block: block.kind):
            blocks = list(neighbours)
            predictions, targets = zip(*(block.joined() for block in blocks), strict=True)
            weights = [weight for block in blocks for weight in block.weights]
            yield Batch(
                self._one(predictions), self._one(targets), torch.cat(weights) if weights else None
            )

    def _one(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].clone() if self._keeps else parts[0]

    def clear(self) -> None:
        """Forget them; the largest block of the last shape is kept for what comes."""
        if self._blocks:
            self._spare = self._blocks[-1]
            self._spare.clear()
            self._blocks.clear()
        self._waiting = self._elements = 0
        self._large = None
