"""The metrics of one output, summed up over its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fitkit.errors import ConfigurationError, FitkitError
from fitkit.metrics.catalogue import NAMES
from fitkit.metrics.gauges import Batch, Call, Mean, Totals
from fitkit.metrics.given import Entry
from fitkit.metrics.merging import State, load_merged, state_of
from fitkit.metrics.pending import Pending
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
