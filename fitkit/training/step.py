"""The forward, loss and metrics of one batch, as configured by `compile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fitkit import trees
from fitkit.accelerators import number_of
from fitkit.compilation import MEMORY_FORMATS
from fitkit.data.arrays import as_tensors
from fitkit.data.batches import Batch, NoRows, check_weights
from fitkit.data.to_device import LABEL_KEYS, Mover, Transfer
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.distributed.wrapped_model import ReplicatedModel, WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.guests import NO_GUEST, Guest, guest_of
from fitkit.hooks import overridden
from fitkit.losses import Ask, CompiledLoss, Count, Term
from fitkit.losses.class_weights import ClassWeights
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.module import Module
from fitkit.shortcuts import Shortcut
from fitkit.training.first_batch import (
    NOTHING_SEEN,
    WEIGHTS,
    DataFacts,
    Seen,
    ask_net,
    check_loss_and_metrics,
    check_parts,
    check_sequences,
)
from fitkit.training.log import Logbook
from fitkit.training.net_call import NetCall
from fitkit.training.parts_of_batches import labels_inside, unpacker_of
from fitkit.typing import Tree

if TYPE_CHECKING:
    from fitkit.extras.sync_batchnorm import Synchronization


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a step found in a batch. It changes nothing: what wants to keep it, records it.

    Attributes:
        loss: of the batch; None if there is none, or if the metrics will compute it.
        count: what the loss is the mean over; None for the batch's samples.
        terms: the losses of several outputs, whose sum is the loss; empty for one loss.
        outputs: of the net, or of a step of the model's own.
        target, weight: of the batch, on the device.
    """

    loss: torch.Tensor | None
    count: Count = None
    terms: Sequence[Term] = ()
    outputs: Any = None
    target: Any = None
    weight: Any = None

    @property
    def counts_apart(self) -> bool:
        """Whether the terms are means over different things."""
        return any(term.count is not None for term in self.terms)


BATCHES_STAY = Shortcut("batches of arrays that need no move")
LOSSES_JOINED = Shortcut("losses of several batches at once, in an evaluation")


class CompiledStep:
    """Computes batches by the net and the loss of `compile`, or by the net alone.

    Everything that can't change within a call is decided in the constructor or at the first batch,
    which has a method of its own. So a step does no more than a hand-written loop. It holds nothing
    of a batch or a pass.

    Args:
        model: the model, with its net and its compiled settings.
        wrapped: calls the net's forward.
        data: what is known of the data.
        predicts: whether to compute outputs alone. Targets and weights are ignored then.
        class_weights: weights by label; training only.
        ranks: the ranks that train together, in training; otherwise None.
        may_count: whether losses may be means over something other than samples.
        joins: whether an evaluation's loss comes from the losses of several batches.
        transfer: the data's own way to move a batch; None leaves that to the model.

    Attributes:
        net: calls the net.
        mover: moves batches to the device.
        loss: the loss; None if outputs are computed alone.
        meters: the metrics; None if there are none.
        class_weights, data, ranks, may_count: as given.
        guest: another library's net; `NO_GUEST` if it is torch's.
        synchronization: what synchronised batch normalisations use; None if there are none.
        seen: what the first batch has shown; None before it.
    """

    def __init__(
        self,
        model: Module,
        wrapped: WrappedModel,
        data: DataFacts | None = None,
        *,
        predicts: bool = False,
        class_weights: ClassWeights | None = None,
        ranks: Collectives | None = None,
        may_count: bool = False,
        joins: bool = False,
        transfer: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        compilation = model._fitkit.compilation
        strategy: Strategy = compilation.strategy
        self.data: DataFacts = data or DataFacts()
        self.net: NetCall = NetCall(model, wrapped)
        self.guest: Guest = guest_of(model) or NO_GUEST
        self.guest.begin(strategy.world.rank)
        self.mover: Mover = mover_of(model, transfer)
        self._unpack = unpacker_of(model, None if predicts else self.data.name)
        self.ranks = ranks
        self.synchronization: Synchronization | None = None
        self.loss: CompiledLoss | None = None
        self.meters: CompiledMetrics | None = None
        self.class_weights = class_weights
        self.may_count = may_count
        self._joins = joins
        if not predicts:
            compilation.loss.to(strategy.device)
            self.loss = compilation.loss.begin()
            self.meters = compilation.metrics.begin() or None
            self.loss.class_weights = class_weights
            if (own := self.loss.own) is not None and isinstance(wrapped, ReplicatedModel):
                wrapped.weigh = lambda output, x: number_of(own.count(output, labels_inside(x)))
        self._asks = self.loss is not None and self.loss.takes_inputs
        self.seen: Seen | None = None
        self._is_agreed = False  # whether all ranks know what the net's own loss is the mean over
        self._opens: bool | None = None  # whether batches are parts that need no move, once known

    @property
    def wrapped(self) -> WrappedModel:
        """What calls the model."""
        return self.net.wrapped

    @property
    def may_be_nan(self) -> bool:
        """Whether a mean over nothing may have NaNs for gradients."""
        return self.loss is not None and self.loss.may_be_nan

    # ------------------------------------------------------------------ a batch's outcome

    def __call__(self, batch: Batch, index: int = 0, *, is_part: bool = False) -> Outcome:
        """Return what the net and the loss give for a batch.

        Args:
            is_part: whether the batch is only a part of an update's samples.

        Raises:
            ConfigurationError: the net, loss or metrics can't take the batch. The message speaks of
                what the user passed, and torch's own error is its cause.
        """
        if self._opens and not batch.is_lent:
            x, y, weight = (*batch.data, None, None)[:3]
        else:
            x, y, weight = self.moved_parts(batch)
        if self.synchronization is not None:
            self.synchronization.counts = batch.samples > 0
        outcome = self.compute(self.net.forward, x, y, weight, is_part=is_part)
        if self._opens is None:
            self._opens = self._needs_no_move(batch.data)
        return outcome

    def again(self, batch: Batch, index: int = 0, *, is_part: bool = False) -> Outcome:
        """Return the batch's outcome again (LBFGS computes it several times)."""
        return self(batch, index, is_part=is_part)

    def moved_parts(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Return a batch's inputs, targets and weights, on the device, in memory of their own."""
        x, y, weight = self.parts(self.mover(batch))
        if weight is not None or (self.seen is not None and self.seen.checks_labels):
            self.check_later(y, weight)
        return x, y, weight

    def parts(self, batch: Tree) -> tuple[Any, Any, Any]:
        """Return the inputs, targets and weights of a batch that is on the device."""
        x, y, weight = self._unpack(batch)
        if self.loss is None:
            y = weight = None
        elif y is None:
            y = labels_inside(x)
        if (sequences := self.net.sequences) is not None:
            if self.seen is None:
                check_sequences(self.net, self.loss, sequences, x, y)
            return sequences.divide(x, y, weight)
        return x, y, weight

    def compute(
        self, forward: Callable[..., Any], x: Tree, y: Tree, weight: Tree, *, is_part: bool = False
    ) -> Outcome:
        """Return the outcome of a batch's parts, by a way to call the net in the right
        precision.
        """
        is_first, loss = self.seen is None, self.loss
        if is_first:
            check_parts(self.data, x, y, weight)
        try:
            ask = self.asking(*self.net.arguments(x)) if self._asks else None
            outputs = self.net(x, forward)
            if loss is None:
                self.seen = NOTHING_SEEN
                if (sequences := self.net.sequences) is not None:
                    outputs = sequences.join(outputs)
                return Outcome(None, None, (), outputs)
            outputs, y, weight = self.guest.for_loss(outputs, y, weight)
            if is_first:
                return self._first_outcome(loss, outputs, x, y, weight, ask, is_part=is_part)
            return self._outcome(loss, outputs, y, weight, ask, is_part=is_part)
        except Exception as error:
            self.explain(error, x, y)
            raise

    def _first_outcome(
        self,
        loss: CompiledLoss,
        outputs: Any,
        x: Tree,
        y: Tree,
        weight: Tree,
        ask: Ask | None,
        *,
        is_part: bool,
    ) -> Outcome:
        """Return the first batch's outcome, with checks of all that shows before an update."""
        ask_net(self.net, loss, outputs, x, y, is_part=is_part)
        device = self.mover.transfer.device
        check_loss_and_metrics(self.net, loss, self.meters, self.guest, outputs, y, ask, device)
        self.seen = Seen(y is not None)
        found = self._outcome(loss, outputs, y, weight, ask, is_part=is_part)
        assert found.loss is not None
        if self._joins:
            loss.tell_sums(outputs, y)
        loss.check_learns(found.loss)
        for targets in (y, *self.data.targets):
            loss.check_labels(targets)
        self.seen = Seen(y is not None, loss.checks_each)
        return found

    def asking(self, given: Sequence[Any], named: Mapping[str, Any]) -> Ask | None:
        """Return what calls other nets with a forward's arguments as they are now.

        Returns:
            None where no loss asks.
        """
        if not self._asks:
            return None
        answers: dict[Callable[..., Any], Any] = {}
        arguments = trees.copied((given, named))  # the forward may write into its own

        def ask(net: Callable[..., Any]) -> Any:
            if net not in answers:
                given, named = trees.copied(arguments)
                answers[net] = self.net.in_precision(net)(*given, **named)
            return answers[net]

        return ask

    def _outcome(
        self,
        loss: CompiledLoss,
        outputs: Any,
        y: Tree,
        weight: Tree,
        ask: Ask | None,
        *,
        is_part: bool,
    ) -> Outcome:
        """Return the outcome of a batch with these outputs, after the first batch's checks."""
        sequences = self.net.sequences
        own, ranks = loss.own, self.ranks
        # Not by what this rank knows: only some ranks' batches may have shown the rule.
        if self.may_count and own is not None and ranks is not None and not self._is_agreed:
            own.count(outputs, y)
            own.agree(ranks)
            self._is_agreed = own.is_decided
        value, count, terms = loss.computed(
            outputs, y, weight, counts=self.may_count, is_part=is_part, ask=ask
        )
        if sequences is not None:
            if terms:
                raise ConfigurationError(
                    "context_parallel trains a net with one loss, but there are several. Add them "
                    "up in one function, or leave context_parallel out."
                )
            value, count = sequences.mean(value, number_of(count))
        value, count, terms = self.guest.with_added(value, count, terms, is_part=is_part)
        outputs, y, weight = self.guest.for_metrics(outputs, y, weight)
        for term in terms:
            term.count = number_of(term.count)
        return Outcome(value, number_of(count), terms, outputs, y, weight)

    def call_epoch_end(self, record: Logbook) -> None:
        """Do nothing at a pass's end: the model has no hook for it."""

    # ------------------------------------------------------------------ what a pass keeps of it

    def record(self, batch: Batch, outcome: Outcome, record: Logbook) -> None:
        """Add a batch's outcome to a pass's values. A batch that doesn't count adds nothing."""
        record.samples = samples = batch.samples
        if samples == 0:
            return
        self.guest.measure(record.logged)
        if outcome.loss is not None:
            count = outcome.count
            if self.net.sequences is not None:  # each rank records the same
                count = (samples if count is None else count) / self.net.sequences.size
            record.add_losses(outcome.loss, count, outcome.terms, samples)
        if self.meters is not None or self.class_weights is not None:
            self._measure(outcome)

    def measure(self, outcome: Outcome, samples: int, record: Logbook) -> None:
        """Add a batch's outcome to the metrics, and to the losses of several outputs."""
        if not outcome.counts_apart:
            record.add_terms(outcome.terms, samples)
        self._measure(outcome)

    def _measure(self, outcome: Outcome) -> None:
        weight = outcome.weight
        if self.class_weights is not None and self.loss is not None:
            weight = self.loss.weigh(outcome.target, weight)
        if self.meters is not None:
            self.meters.update(outcome.outputs, outcome.target, weight)

    def joining_losses(self, first: Batch) -> JoinedLosses | None:
        """Return what leaves the losses of a pass's later batches to the metrics.

        None where the losses aren't means over samples, or samples have weights, or the batches
        aren't rows of arrays that are on the device.
        """
        only = None if self.meters is None else self.meters.only
        is_on = LOSSES_JOINED.is_on and self.guest is NO_GUEST
        if only is None or self.loss is None or self.may_count or not is_on:
            return None
        of_each = self.loss.of_each(list(self.data.targets))
        has_weights = not self._opens or len(first.data) > 2
        if of_each is None or has_weights or not self.net.is_plain:
            return None
        only.join_loss(of_each, self.mover.transfer.device)
        return JoinedLosses(self)

    # ------------------------------------------------------------------ later batches

    def _needs_no_move(self, data: Any) -> bool:
        """Return by the first batch, after its forward, whether others need no move."""
        are_rows = type(data) is tuple and self.data.keeps_batches and self.net.sequences is None
        if not are_rows or not BATCHES_STAY.is_on or self.seen is None:
            return False
        is_known = bool(self.data.targets) or not self.seen.checks_labels
        return is_known and self.mover.leaves(data)

    def check_later(self, y: Tree, weight: Tree) -> None:
        """Refuse labels and weights of a later batch that would silently count.

        Those on a device aren't read, because it would have to be waited for.
        """
        if self.seen is None or self.loss is None:
            return
        if weight is not None and _are_in_main_memory(weight):
            check_weights(weight, WEIGHTS)
        if self.seen.checks_labels and y is not None and _are_in_main_memory(y):
            self.loss.check_labels(y)

    def looking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a pass's batches; those on their way to a device are checked before."""
        known = self.data.keeps_batches and bool(self.data.targets)
        on_cpu = self.mover.transfer.device.type == "cpu"  # there, `moved_parts` checks them
        if self.loss is None or known or on_cpu:
            return batches
        return map(self._looked_at, batches)

    def _looked_at(self, batch: Any) -> Any:
        if self.seen is not None and batch is not NoRows:
            x, y, weight = self._unpack(batch.data)
            given = (labels_inside(x) if y is None else y), weight
            self.check_later(*trees.map_leaves(self._as_tensor, given))
        return batch

    def _as_tensor(self, leaf: object) -> object:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            return as_tensors(leaf, "y", self.mover.transfer.wide_dtype, target=True)
        return leaf

    def counts_of(self, batch: Batch) -> list[float]:
        """Return what each output's mean will be taken over, for a batch that isn't computed
        yet.
        """
        assert self.loss is not None
        _, y, _ = self._unpack(batch.data)
        samples, counts = batch.samples, self.loss.counts(trees.map_leaves(torch.as_tensor, y))
        counts = self.guest.counts_to_come(counts)
        return [float(samples if c is None or not samples else c) for c in counts]

    def explain(self, error: Exception, x: Tree, y: Tree) -> None:
        """Replace an error that a batch caused by a clearer one, if there is one."""
        from fitkit.extras.explain import raise_explained, shape_words

        if y is None and self.seen is not None and self.seen.had_target:
            raise ConfigurationError(
                f"A batch of {self.data.name} has only inputs ({shape_words(x, 'x')}), but the "
                "first batch had targets too. Give (x, y) in each batch."
            ) from error
        needs = self.loss is not None and self.loss.own is None
        raise_explained(error, self.wrapped.module, x, y, self.data.name, needs_target=needs)


class JoinedLosses:
    """Makes steps of a pass whose losses the metrics compute, many batches at once.

    Args:
        step: has made the pass's first step, with all checks.
    """

    def __init__(self, step: CompiledStep) -> None:
        self._step = step
        self._shape = torch.Size()

    def __call__(self, batch: Batch, index: int = 0) -> Outcome:
        """Return a batch's outputs and targets, without a loss."""
        step = self._step
        if batch.is_lent:
            x, y, _ = step.moved_parts(batch)
        else:
            x, y = batch.data
        try:
            outputs = step.net(x)
            # Compute the loss if the outputs' shape changes. A misfit then fails by itself, before
            # it is joined with other batches.
            if outputs.shape != self._shape:
                assert step.loss is not None
                step.loss(outputs, y)
                self._shape = outputs.shape
        except Exception as error:
            step.explain(error, x, y)
            raise
        return Outcome(None, None, (), outputs, y)


def _are_in_main_memory(tree: Tree) -> bool:
    """Whether a tree consists of tensors there."""
    found = (leaf for leaf in trees.leaves(tree) if leaf is not None)
    return all(isinstance(leaf, torch.Tensor) and leaf.is_cpu for leaf in found)


def mover_of(model: Module, own: Callable[..., Any] | None = None) -> Mover:
    """Return the mover of batches to the model's device, in the model's dtype.

    Args:
        own: the data's own way, which goes before the model's.
    """
    compilation = model._fitkit.compilation
    strategy, word = compilation.strategy, compilation.given.memory_format
    format_of_images = None if word is None else MEMORY_FORMATS[word]
    labels = (*LABEL_KEYS, *trees.leaves(compilation.given.target or ()))
    dtype = strategy.precision.input_dtype(model)
    transfer = Transfer(strategy.device, dtype, format_of_images, labels)
    if own is None and overridden(model, "transfer_batch_to_device"):
        own = model.transfer_batch_to_device
    return Mover(transfer, own)
