"""The forward, loss and metrics of one batch, as configured by `compile`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fitkit import trees
from fitkit.accelerators import number_of
from fitkit.compilation import MEMORY_FORMATS
from fitkit.data.arrays import as_tensors
from fitkit.data.batches import Batch, NoRows, check_weights, warn_of_second_target
from fitkit.data.to_device import LABEL_KEYS, Mover, Transfer
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.distributed.wrapped_model import DividedModel, ReplicatedModel, WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.guests import NO_GUEST, Guest, guest_of
from fitkit.hooks import overridden
from fitkit.losses import Ask, CompiledLoss, Count, Term
from fitkit.losses.class_weights import ClassWeights
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.modes import modes_restored
from fitkit.module import Module
from fitkit.samples import samples_in
from fitkit.shortcuts import Shortcut
from fitkit.training.caller import Caller, caller_of
from fitkit.training.log import Logbook
from fitkit.training.parts_of_batches import labels_inside, unpacker_of
from fitkit.typing import Outputs, Tree

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
NO_CAST = Shortcut("no autocast where the precision changes nothing")


class CompiledStep:
    """Computes batches by the net and the loss of `compile`, or by the net alone.

    Everything that can't change within a call is decided in the constructor or at the first batch.
    So a step does no more than a hand-written loop.

    Args:
        model: the model, with its net and its compiled settings.
        wrapped: calls the net's forward.
        predicts: whether to compute outputs alone. Targets and weights are ignored then.
        class_weights: weights by label; training only.
        all_targets: all targets of in-memory data (for several data sets, a list). Their labels are
            checked at the first batch, and decide whether an evaluation's losses are joined.
        name: the data's name for messages.
        ranks: the ranks that train together, in training; otherwise None.
        may_count: whether losses may be means over something other than samples.
        keeps_batches: whether batches are rows of arrays, not a generator's.
        transfer: the data's own way to move a batch; None leaves that to the model.

    Attributes:
        may_count: as given.
        may_be_nan: whether a mean over nothing may have NaNs for gradients.
        keeps_batches: whether batches' memory stays unchanged while others are read.
        synchronization: what synchronised batch normalisations use; None if there are none.
    """

    def __init__(
        self,
        model: Module,
        wrapped: WrappedModel,
        *,
        predicts: bool = False,
        class_weights: ClassWeights | None = None,
        all_targets: list[Any] | None = None,
        name: str = "x",
        ranks: Collectives | None = None,
        may_count: bool = False,
        keeps_batches: bool = False,
        transfer: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        compilation = model._fitkit.compilation
        strategy: Strategy = compilation.strategy
        self.wrapped = wrapped
        self._precision, self._kind = strategy.precision, strategy.device.type
        self._is_plain = strategy.precision.is_plain and NO_CAST.is_on
        self.enter_again()
        self._sequences = wrapped if isinstance(wrapped, DividedModel) else None
        self._guest: Guest = guest_of(model) or NO_GUEST
        self._guest.begin(strategy.world.rank)
        self.caller: Caller = caller_of(model)
        self.mover: Mover = mover_of(model, transfer)
        self._unpack = unpacker_of(model, None if predicts else name)
        self._ranks = ranks
        self.synchronization: Synchronization | None = None
        self.loss: CompiledLoss | None = None
        self._asks = False  # whether a loss calls other nets
        metrics = CompiledMetrics()
        if not predicts:
            compilation.loss.to(strategy.device)
            self.loss, metrics = compilation.loss.begin(), compilation.metrics.begin()
            self.loss.class_weights = class_weights
            self._asks = self.loss.takes_inputs
            if (own := self.loss.own) is not None and isinstance(wrapped, ReplicatedModel):
                wrapped.weigh = lambda output, x: number_of(own.count(output, labels_inside(x)))
        self.logbook: Logbook = Logbook(metrics)
        self.logbook.doubts = model._fitkit.doubts
        self.meters: CompiledMetrics | None = self.logbook.meters or None
        self.class_weights = class_weights
        self.all_targets: list[Any] = all_targets or []
        self.name = name
        self.checked: bool = False
        self._had_target = False
        self._is_first = True
        self._opens = False  # whether batches are parts that need no move
        self._has_weights = False
        self._checks_labels = False  # of each batch
        self._joins: torch.Size | None = None  # of predictions whose losses the metrics compute
        self.may_count = may_count
        self.may_be_nan: bool = compilation.loss.may_be_nan
        self.keeps_batches = keeps_batches
        self._waits_for_ranks = strategy.evaluates_in_step and strategy.world.size > 1
        self._replicas = threading.Lock()

    def enter_again(self) -> None:
        """Call the net as the model is wrapped now."""
        self.forward: Callable[..., Any] = self.in_precision(forward_of(self.wrapped))

    def in_precision(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call of the net in the strategy's precision; also traced."""
        if self._is_plain:
            return forward

        def call(*given: Any, **named: Any) -> Any:
            with self._precision.autocast(self._kind):
                outputs = forward(*given, **named)
            return self._precision.widen(outputs)

        return call

    def begin(self) -> None:
        """Begin a new pass."""
        self.logbook.reset()
        self._joins = None

    def finish(self) -> None:
        """End the pass: the metrics count the waiting batches."""
        if self.meters is not None:
            self.meters.flush()

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
        outcome = self.compute(self.forward, x, y, weight, is_part=is_part)
        if self._is_first:
            self._is_first = False
            self._look_at(batch.data)
        return outcome

    def again(self, batch: Batch, index: int = 0, *, is_part: bool = False) -> Outcome:
        """Return the batch's outcome again (LBFGS computes it several times)."""
        return self(batch, index, is_part=is_part)

    def run_first_checks(self, batch: Batch, wrapped: WrappedModel) -> None:
        """Run the first batch's checks with a batch that doesn't count.

        Args:
            wrapped: the model as evaluations call it: without DDP, but with gathering of sharded
                weights.
        """
        forward = self.in_precision(forward_of(wrapped))
        self.compute(forward, *self.moved_parts(batch))

    def inside(
        self, model: Callable[..., Any], batch: Tree, *, is_part: bool, counts: bool
    ) -> Outcome:
        """Return the outcome of a batch inside a step of the model's own. Only the metrics record
        it.

        Args:
            model: the model, or one of its replicas.
            batch: a batch on the device.
            is_part: as in a call.
            counts: whether the metrics count it.
        """
        x, y, weight = self.parts(batch)
        self._check_later(y, weight)
        # Replicas take turns at the first batch, whose checks build the metrics, and at their sums.
        with contextlib.nullcontext() if self.checked else self._replicas:
            outcome = self.compute(self.in_precision(model), x, y, weight, is_part=is_part)
        if counts:
            with self._replicas, torch.no_grad():
                shown = outcome
                if isinstance(self.wrapped, ReplicatedModel):
                    values = (outcome.outputs, outcome.target, outcome.weight)
                    outputs, y_shown, weight = self._brought(values)
                    shown = dataclasses.replace(
                        outcome, outputs=outputs, target=y_shown, weight=weight
                    )
                self.measure(shown, samples_in(x, y))
        return outcome

    def _brought(self, values: Tree) -> Any:
        """Return a replica's values on the model's device, where the metrics are."""
        if not isinstance(self.wrapped, ReplicatedModel):
            return values
        return trees.map_leaves(self._brought_leaf, values)

    def _brought_leaf(self, leaf: object) -> object:
        return leaf.to(self.mover.transfer.device) if isinstance(leaf, torch.Tensor) else leaf

    def outputs_inside(self, model: Callable[..., Any], batch: Tree) -> Any:
        """Return the net's outputs for a batch that is on the device, inside a `predict_step`."""
        return self.caller(self.in_precision(model), self.parts(batch)[0])

    def moved_parts(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Return a batch's inputs, targets and weights, on the device, in memory of their own."""
        x, y, weight = self.parts(self.mover(batch))
        if weight is not None or self._checks_labels:
            self._check_later(y, weight)
        return x, y, weight

    def parts(self, batch: Tree) -> tuple[Any, Any, Any]:
        """Return the inputs, targets and weights of a batch that is on the device."""
        x, y, weight = self._unpack(batch)
        if self.loss is None:
            y = weight = None
        elif y is None:
            y = labels_inside(x)
        if self._sequences is not None:
            if not self.checked:
                self._check_sequences(self._sequences, x, y)
            return self._sequences.divide(x, y, weight)
        return x, y, weight

    def compute(
        self, forward: Callable[..., Any], x: Tree, y: Tree, weight: Tree, *, is_part: bool = False
    ) -> Outcome:
        """Return the outcome of a batch's parts, by a way to call the net in the right
        precision.
        """
        if not self.checked:
            self._check_batch(x, y, weight)
        try:
            ask = self.asking(*self._arguments(x)) if self._asks else None
            outputs = forward(x) if type(x) is torch.Tensor else self.caller(forward, x)
            if self.loss is not None:
                outputs, y, weight = self._guest.for_loss(outputs, y, weight)
            if not self.checked:
                return self._first_outcome(outputs, x, y, weight, is_part, ask)
            return self._outcome(outputs, y, weight, is_part, ask)
        except Exception as error:
            self.explain(error, x, y)
            raise

    def _arguments(self, x: Tree) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a forward's arguments for a batch's inputs: by position, and by keyword."""
        return ((x,), {}) if isinstance(x, torch.Tensor) else self.caller.arguments(x)

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
                answers[net] = self.in_precision(net)(*given, **named)
            return answers[net]

        return ask

    def _outcome(
        self, outputs: Any, y: Tree, weight: Tree, is_part: bool, ask: Ask | None
    ) -> Outcome:
        """Return the outcome of a batch with these outputs, after the first batch's checks."""
        loss, sequences = self.loss, self._sequences
        if loss is None:
            whole = outputs if sequences is None else sequences.join(outputs)
            return Outcome(None, None, (), whole)
        # Compute the loss if the outputs' shape changes. A misfit then fails by itself, before it
        # is joined with other batches.
        if self._joins is not None:
            if outputs.shape != self._joins:
                loss(outputs, y)
                self._joins = outputs.shape
            return Outcome(None, None, (), outputs, y, weight)
        own, ranks = loss.own, self._ranks
        if self.may_count and own is not None and ranks is not None and not own.is_decided:
            own.count(outputs, y)
            own.agree(ranks)
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
        value, count, terms = self._guest.with_added(value, count, terms, is_part=is_part)
        outputs, y, weight = self._guest.for_metrics(outputs, y, weight)
        for term in terms:
            term.count = number_of(term.count)
        return Outcome(value, number_of(count), terms, outputs, y, weight)

    # ------------------------------------------------------------------ what a pass keeps of it

    def record(self, batch: Batch, outcome: Outcome) -> None:
        """Add a batch's outcome to the pass's values. A batch that doesn't count adds nothing."""
        self.logbook.samples = samples = batch.samples
        if samples == 0:
            return
        self._guest.measure(self.logbook.logged)
        if outcome.loss is not None:
            count = outcome.count
            if self._sequences is not None:  # each rank records the same
                count = (samples if count is None else count) / self._sequences.size
            self.logbook.add_losses(outcome.loss, count, outcome.terms, samples)
        if self.meters is not None or self.class_weights is not None:
            self._measure(outcome)

    def measure(self, outcome: Outcome, samples: int) -> None:
        """Add a batch's outcome to the metrics, and to the losses of several outputs."""
        if not outcome.counts_apart:
            self.logbook.add_terms(outcome.terms, samples)
        self._measure(outcome)

    def _measure(self, outcome: Outcome) -> None:
        weight = outcome.weight
        if self.class_weights is not None and self.loss is not None:
            weight = self.loss.weigh(outcome.target, weight)
        if self.meters is not None:
            self.meters.update(outcome.outputs, outcome.target, weight)

    def join_losses(self) -> None:
        """Leave the losses of later batches to the metrics, which compute many at once.

        Does nothing where the losses aren't means over samples, or samples have weights, or the
        batches aren't rows of arrays that are on the device.
        """
        only = None if self.meters is None else self.meters.only
        is_on = LOSSES_JOINED.is_on and self._guest is NO_GUEST
        if only is None or self.loss is None or self.may_count or not is_on:
            return
        of_each = self.loss.of_each(self.all_targets)
        if of_each is not None and self._opens and self._is_plain and not self._has_weights:
            only.join_loss(of_each, self.mover.transfer.device)
            self._joins = torch.Size()

    # ------------------------------------------------------------------ the first batch

    def _first_outcome(
        self, outputs: Outputs, x: Tree, y: Tree, weight: Tree, is_part: bool, ask: Ask | None
    ) -> Outcome:
        """Return the first batch's outcome, and its checks of everything that shows before an
        update.
        """
        loss = self.loss
        if loss is None:
            self.checked = True
            return self._outcome(outputs, y, weight, is_part, ask)
        self._ask_net(loss, outputs, x, y, is_part)
        with torch.no_grad():
            loss.check(outputs, y, ask)
            if self.meters is not None:
                hint = functools.partial(loss.hint, net=self.wrapped.module)
                shown, labels = self._brought((outputs, y))
                shown, labels, _ = self._guest.for_metrics(shown, labels, None)
                self.meters.start(shown, labels, hint, loss.trained)
        self.checked = True
        self._had_target = y is not None
        found = self._outcome(outputs, y, weight, is_part, ask)
        assert found.loss is not None
        loss.check_learns(found.loss)
        for targets in (y, *self.all_targets):
            loss.check_labels(targets)
        self._checks_labels = loss.checks_each
        return found

    def _look_at(self, data: Any) -> None:
        """Decide by the first batch, after its forward, whether others need no move."""
        are_rows = self.keeps_batches and type(data) is tuple and self._sequences is None
        if are_rows and BATCHES_STAY.is_on:
            is_known = bool(self.all_targets) or not self._checks_labels
            self._opens = is_known and self.mover.leaves(data)
            self._has_weights = len(data) > 2

    # ------------------------------------------------------------------ later batches

    def _check_later(self, y: Tree, weight: Tree) -> None:
        """Refuse labels and weights of a later batch that would silently count.

        Those on a device aren't read, because it would have to be waited for.
        """
        if not self.checked or self.loss is None:
            return
        if weight is not None and _are_in_main_memory(weight):
            check_weights(weight, WEIGHTS)
        if self._checks_labels and y is not None and _are_in_main_memory(y):
            self.loss.check_labels(y)

    def looking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a pass's batches; those on their way to a device are checked before."""
        known = self.keeps_batches and bool(self.all_targets)
        if self.loss is None or known or self._kind == "cpu":  # there, `moved_parts` checks them
            return batches
        return map(self._looked_at, batches)

    def _looked_at(self, batch: Any) -> Any:
        if self.checked and batch is not NoRows:
            x, y, weight = self._unpack(batch.data)
            given = (labels_inside(x) if y is None else y), weight
            self._check_later(*trees.map_leaves(self._as_tensor, given))
        return batch

    def _as_tensor(self, leaf: object) -> object:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            return as_tensors(leaf, "y", self.mover.transfer.wide_dtype, target=True)
        return leaf

    # ------------------------------------------------------------------ the first batch's parts

    def _check_batch(self, x: Tree, y: Tree, weight: Tree) -> None:
        """Refuse an invalid first batch before the net gets it."""
        check_inputs(x, weight, self.name)
        if self.all_targets and self.all_targets[0] is None:  # the user named none, as for arrays
            warn_of_second_target(y, weight)

    def _check_sequences(self, sequences: DividedModel, x: Tree, y: Tree) -> None:
        """Refuse a net or a loss that can't be computed from parts of sequences."""

        def outputs(forward: Callable[..., Any], x: Tree) -> Any:
            return self.caller(self.in_precision(forward), x)

        loss = self.loss
        if loss is None:
            sequences.check(outputs, x)
            return
        if loss.own is not None:
            raise ConfigurationError(
                "A net that computes its own loss sees only a part of each sequence under "
                "context_parallel. Give compile a loss, and fit (x, y) with the label of each "
                "token in its place."
            )
        if loss.takes_inputs:
            raise ConfigurationError(
                "A teacher would see only a part of each sequence under context_parallel. Leave "
                "context_parallel out, or train without a teacher."
            )
        whole, y, part, y_part = sequences.check(outputs, x, y)
        if not loss.has_user_code:
            return
        with torch.no_grad():
            fresh = loss.begin()
            (term, *_) = fresh.terms(part, y_part, None, is_part=True)
            sequences.check_loss(
                fresh(whole, y)[0], term.scale * sequences.mean(term.value, term.count)[0]
            )

    def _ask_net(
        self, loss: CompiledLoss, outputs: Outputs, x: Tree, y: Tree, is_part: bool
    ) -> None:
        """Find out what a net's own loss is the mean over, by asking it in other ways."""
        own = loss.own
        if own is None or own.is_decided or not isinstance(x, Mapping):
            return
        net = self.wrapped.module

        def computed(inputs: Tree) -> Any:
            with modes_restored(net), torch.no_grad():
                net.eval()
                return self.caller(self.in_precision(net), trees.copied(inputs))

        from fitkit.extras.own_loss import ask

        # A net that ranks hold in parts must be called equally often on all of them.
        asks_rows = not self._waits_for_ranks
        ask(own, net, self.caller, computed, outputs, x, y, is_part=is_part, asks_rows=asks_rows)

    def counts_of(self, batch: Batch) -> list[float]:
        """Return what each output's mean will be taken over, for a batch that isn't computed
        yet.
        """
        assert self.loss is not None
        _, y, _ = self._unpack(batch.data)
        samples, counts = batch.samples, self.loss.counts(trees.map_leaves(torch.as_tensor, y))
        counts = self._guest.counts_to_come(counts)
        return [float(samples if c is None or not samples else c) for c in counts]

    def explain(self, error: Exception, x: Tree, y: Tree) -> None:
        """Replace an error that a batch caused by a clearer one, if there is one."""
        from fitkit.extras.explain import raise_explained, shape_words

        if y is None and self._had_target:
            raise ConfigurationError(
                f"A batch of {self.name} has only inputs ({shape_words(x, 'x')}), but the first "
                "batch had targets too. Give (x, y) in each batch."
            ) from error
        needs = self.loss is not None and self.loss.own is None
        raise_explained(error, self.wrapped.module, x, y, self.name, needs_target=needs)


def check_inputs(x: Tree, weight: Tree, name: str) -> None:
    """Refuse a batch without a tensor of inputs, or with invalid weights.

    Raises:
        ConfigurationError: with what the batch holds.
    """
    if not any(isinstance(leaf, torch.Tensor) for leaf in trees.leaves(x)):
        plain = (int, float, str, bytes, type(None), np.ndarray)
        if all(isinstance(leaf, plain) for leaf in trees.leaves(x)):
            from fitkit.extras.explain import shape_words

            raise ConfigurationError(
                f"A batch of {name} has no tensor: {shape_words(x, 'its input')}. A batch is "
                "(x, y) or (x, y, sample_weight) of tensors or NumPy arrays. If the data are one "
                "batch, such as one graph, write [batch]."
            )
    wrong = [leaf for leaf in trees.leaves(weight) if not isinstance(leaf, torch.Tensor)]
    if any(leaf is not None for leaf in wrong):
        raise ConfigurationError(
            f"A batch's sample_weight holds a {type(wrong[0]).__name__}; it must be a tensor or "
            "array of one weight per sample. Leave out a third entry of another meaning, such as "
            "names of files, in a collate_fn, or write a training_step."
        )
    check_weights(weight, WEIGHTS)


WEIGHTS = "A batch's third entry is the sample weights (several targets are (x, (y, y2))); it"


def _are_in_main_memory(tree: Tree) -> bool:
    """Whether a tree consists of tensors there."""
    found = (leaf for leaf in trees.leaves(tree) if leaf is not None)
    return all(isinstance(leaf, torch.Tensor) and leaf.is_cpu for leaf in found)


NET_ITSELF = Shortcut("the net called without the model around it")


def forward_of(wrapped: WrappedModel) -> Callable[..., Any]:
    """Return what calls a wrapped model: its network directly, if nothing is around it."""
    if not wrapped.is_bare:
        return partial(wrapped, "")
    model = wrapped.module
    if not (is_plain_wrapper(model) and NET_ITSELF.is_on):
        return model
    parts = model._modules
    before, after = model._forward_pre_hooks, model._forward_hooks
    backward, backward_before = model._backward_hooks, model._backward_pre_hooks

    def forward(*inputs: Any, **named: Any) -> Any:
        if before or after or backward or backward_before or _has_any_global_hook():
            return model(*inputs, **named)
        net: Any = parts["net"]
        return net(*inputs, **named)

    return forward


def is_plain_wrapper(model: nn.Module) -> bool:
    """Whether calling a model returns what its net returns, and does nothing else."""
    kind = type(model)
    is_ours = getattr(kind, "forward", None) is Module.forward
    is_ours = is_ours and kind.__call__ is nn.Module.__call__ and "forward" not in vars(model)
    return is_ours and isinstance(model.net, nn.Module)


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
