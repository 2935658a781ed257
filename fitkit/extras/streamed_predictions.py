"""Predictions that are handed on while they are computed, so that memory holds a few batches."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fitkit import trees
from fitkit.errors import ConfigurationError
from fitkit.seams.data import Batch, NoRows
from fitkit.seams.networks import Module
from fitkit.seams.passes import (
    EvaluateArguments,
    HostCopies,
    in_input_order,
    predict_source,
    surroundings,
)
from fitkit.seams.steps import Outcome
from fitkit.seams.strategies import Collectives, Strategy

BUNDLE_BYTES = 2 * 2**20
"""How much a rank collects before the ranks exchange it, if a batch isn't larger."""
BUNDLE_S = 0.1
"""How long it collects. So somebody who waits for slow batches gets them soon."""


class Receiver(Protocol):
    """What takes the outputs of a pass, in the order of the inputs.

    It is a context manager. It is entered before the first batch, and learns of errors at its end.

    Attributes:
        on_every_rank: whether each rank gets all outputs, or only rank 0.
        has_left: whether nobody here wants the rest.
        is_cut: set where another rank's receiver has left, which ends the pass on all ranks.
        result: what all ranks get to know at the end.
    """

    on_every_rank: bool
    has_left: bool
    is_cut: bool
    result: Any

    def take(self, batches: list[tuple[Any, int]]) -> None:
        """Take the outputs of the next batches, which are on the CPU, with their samples."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


class Elsewhere(contextlib.AbstractContextManager[None]):
    """Stands for the receiver in processes that get no outputs."""

    on_every_rank = False
    has_left = False
    is_cut = False
    result: Any = None

    def take(self, batches: list[tuple[Any, int]]) -> None:
        """Never called."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def run_streamed(model: Module, arguments: EvaluateArguments, receiver: Receiver) -> Any:
    """Run `predict` on this rank, and hand the outputs on as they come; return the result.

    Ranks:
        Collective. The ranks exchange their outputs every few batches, in step.

    Raises:
        ConfigurationError: x is empty.
    """
    strategy: Strategy = model._fitkit.compilation.strategy
    if strategy.collectives.rank and not receiver.on_every_rank:
        receiver = Elsewhere()
    with receiver, surroundings(model, "predict", arguments.source.batch_size):
        shipment = Shipment(model, strategy, receiver)
        predict_source(model, arguments, shipment)
        shipment.finish()
        if shipment.stopped:
            model.stop_predicting = False
        if not shipment.samples_of_all and not shipment.stopped:
            raise ConfigurationError("x is empty: it gave no samples.")
    return strategy.collectives.broadcast(receiver.result)


class Shipment(HostCopies):
    """Collects a rank's outputs, and hands those of all ranks on every few batches.

    All ranks hand on after equally many batches, so their outputs are in turn then. Rank 0 decides
    how many the next ones are, by the memory and the time that the last ones took.

    Args:
        model: the model that computes. Its pass ends where the receiver has left.
        strategy: has the ranks, and those among which the batches are divided.
        receiver: takes the outputs of all ranks.

    Attributes:
        samples_of_all: the samples that have been handed on.
        stopped: whether a receiver has left.
    """

    def __init__(self, model: Module, strategy: Strategy, receiver: Receiver) -> None:
        super().__init__()
        self.samples_of_all: int = 0
        self.stopped: bool = False
        self._model = model
        self._data_ranks: Collectives = strategy.data_ranks
        self._ranks: Collectives = strategy.collectives
        self._receiver = receiver
        self._group_size = model._fitkit.compilation.given.steps_per_execution
        self._most = 1  # batches in the next bundle
        self._begun = time.perf_counter()

    def take(self, batch: Batch, outcome: Outcome) -> None:
        """Add a batch's outputs."""
        self._hand_on_if_due()
        super().take(batch, outcome)

    def skip(self) -> None:
        """Add `NoRows` in place of the outputs of a batch without rows."""
        self._hand_on_if_due()
        super().skip()

    def _hand_on_if_due(self) -> None:
        count = len(self.samples)
        # The hooks of a group of batches may still read its outputs.
        if count >= self._most and (self.handed_on + count) % self._group_size == 0:
            self._hand_on(ended=False)

    def finish(self) -> None:
        """Hand on what is left on all ranks.

        Ranks:
            Collective.
        """
        while self._hand_on(ended=True):
            pass

    def _hand_on(self, *, ended: bool) -> bool:
        """Hand on what there is; return whether a rank still computes.

        Ranks:
            Collective.
        """
        self.wait()
        bundle, count = bundle_of(self.outputs, self.samples), len(self.samples)
        self.handed_on += count
        self.outputs, self.samples = [], []
        size = trees.tensor_bytes(bundle.outputs)
        if self._receiver.on_every_rank:
            everyone = self._data_ranks.gather(bundle)
        else:
            everyone = self._data_ranks.collect(bundle) or []
        batches = list(in_input_order([list(bundle.batches()) for bundle in everyone]))
        self.samples_of_all += sum(samples for _, samples in batches)
        if batches and not self.stopped:
            self._receiver.take(batches)
        is_first = self._ranks.rank == 0
        computing, left, most, total = self._ranks.sums([
            float(not ended),
            float(self._receiver.has_left),
            float(self._next_number(count, size)) if is_first else 0.0,
            float(self.samples_of_all) if is_first else 0.0,
        ])  # fmt: skip
        self._most, self.samples_of_all = int(most), int(total)
        self._begun = time.perf_counter()
        if left:
            self.stopped = self._model.stop_predicting = True
            self._receiver.is_cut = not self._receiver.has_left
        return computing > 0

    def _next_number(self, count: int, size: int) -> int:
        """How many batches to collect next, after so many of so many bytes."""
        if not count:
            return self._most
        seconds = time.perf_counter() - self._begun
        by_size = BUNDLE_BYTES * count // max(size, 1)
        by_time = int(BUNDLE_S * count / max(seconds, 1e-9))
        return max(1, min(2 * count, by_size, by_time))


@dataclasses.dataclass
class Bundle:
    """The outputs of some batches of a rank, as they travel.

    Attributes:
        outputs: one tensor with the rows of all batches, or the batches' outputs.
        rows: the rows of each batch in that tensor.
        samples: the samples of each batch. One without samples doesn't count.
    """

    outputs: Any
    rows: list[int]
    samples: list[int]

    def batches(self) -> Iterator[Any]:
        """Each batch's outputs and samples, or `NoRows`."""
        is_joined = isinstance(self.outputs, torch.Tensor)
        outputs = iter(self.outputs.split(self.rows) if is_joined else self.outputs)
        for samples in self.samples:
            yield (next(outputs), samples) if samples else NoRows


def bundle_of(outputs: list[Any], samples: list[int]) -> Bundle:
    """Return a bundle with copies of outputs: a net may return its input, or a parameter."""
    counted = [output for output, count in zip(outputs, samples, strict=True) if count]
    first = counted[0] if counted else None
    if type(first) is torch.Tensor and all(
        type(output) is torch.Tensor
        and output.ndim
        and output.layout is torch.strided
        and output.dtype == first.dtype
        and output.shape[1:] == first.shape[1:]
        for output in counted
    ):
        return Bundle(torch.cat(counted), [len(output) for output in counted], samples)
    return Bundle([trees.copied(output) for output in counted], [], samples)
