"""The forward, loss and metrics of one batch, as configured by `compile`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fitkit import trees
from fitkit.data.batches import Batch, check_weights, unpack_batch, warn_of_second_target
from fitkit.data.to_device import LABEL_KEYS, Mover, Transfer
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.spread.context_parallel import SequenceParts
from fitkit.distributed.strategies import Strategy
from fitkit.distributed.sync_batchnorm import Synchronization
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.hooks import overridden
from fitkit.losses import CompiledLoss, Count, Term
from fitkit.losses.class_weights import ClassWeights
from fitkit.losses.compiled import total_of
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.modes import modes_restored
from fitkit.module import Module
from fitkit.samples import counted, counted_in, plain_rows, said_by, samples_in
from fitkit.training.explain import raise_explained, shape_words
from fitkit.training.log import Logbook
from fitkit.training.own_loss import ask_for_rows, ask_for_sum, takes_items_in_batch
from fitkit.training.settings import MEMORY_FORMATS


class CompiledStep:
    """Computes the losses of batches and keeps the pass's running values.

    Everything that can't change within a call is decided in the constructor or at the first batch.
    So a step does no more than a hand-written loop.

    Args:
        model: the model, with its net and its compiled settings.
        wrapped: calls the net's forward.
        class_weights: weights by label; training only.
        all_targets: all targets of in-memory data (for several data sets, a list). Their labels are
            checked at the first batch, and decide whether an evaluation's losses are joined.
        name: the data's name for messages.
        ranks: the ranks that train together, in training; otherwise None.
        may_count: whether losses may be means over something other than samples.
        keeps_batches: whether batches are rows of arrays, not a generator's.

    Attributes:
        samples: the samples of the last batch on this rank; 0 if it was padding.
        total: the samples of the last batches on all ranks.
        count: what the last batch's loss was the mean over; None for its samples.
        may_count: as given.
        keeps_batches: whether batches' memory stays unchanged while others are read.
        terms: the last batch's losses, if several outputs may count differently.
        is_part: whether the next batch is only a part of an update's samples.
        synchronization: what synchronised batch normalisations use; None if there are none.
    """

    def __init__(
        self,
        model: Module,
        wrapped: WrappedModel,
        *,
        class_weights: ClassWeights | None = None,
        all_targets: list[Any] | None = None,
        name: str = "x",
        ranks: Collectives | None = None,
        may_count: bool = True,
        keeps_batches: bool = False,
    ) -> None:
        compilation = model._fitkit.compilation
        strategy: Strategy = compilation.strategy
        self.wrapped = wrapped
        self.forward: Callable[..., Any] = forward_of(wrapped)
        self._sequences = wrapped if isinstance(wrapped, SequenceParts) else None
        self.caller: Caller = caller_of(model)
        self.mover: Mover = mover_of(model)
        self._unpack = unpacker_of(model, name)
        self._ranks = ranks
        self._move = self.mover.move
        self._autocast, self._widen = strategy.precision.autocast, strategy.precision.widen
        self._kind = strategy.device.type
        self.synchronization: Synchronization | None = None
        compilation.loss.to(strategy.device)
        self.loss: CompiledLoss = compilation.loss.begin()
        self.loss.class_weights = class_weights
        self.logbook: Logbook = Logbook(compilation.metrics.begin())
        self.logbook.doubts = model._fitkit.doubts
        self.meters: CompiledMetrics | None = self.logbook.meters or None
        self.class_weights = class_weights
        self.all_targets: list[Any] = all_targets or []
        self.name = name
        self.checked: bool = False
        self._had_target = False
        self.samples: int = 0
        self.total: int = 0
        self.may_count = may_count
        self.keeps_batches = keeps_batches
        if (own := self.loss.own) is not None:
            wrapped.weigh = lambda output, x: number_of(own.count(output, labels_inside(x)))
        self.count: Count = None
        self.terms: list[Term] | None = None
        self.inside_loss: torch.Tensor | None = None  # the last one that the model's own step got
        self.is_part = False
        self._waits_for_ranks = strategy.evaluates_in_step and strategy.world.size > 1
        self._replicas = threading.Lock()

    def begin(self) -> None:
        """Begin a new pass."""
        self.logbook.reset()

    def finish(self) -> None:
        """End the pass: the metrics count the waiting batches."""
        if self.meters is not None:
            self.meters.flush()

    def undo_writes(self) -> None:
        """Undo the first batch's changes to the data's memory."""
        self.mover.transfer.undo_writes()

    def __call__(self, batch: Batch, index: int = 0) -> torch.Tensor:
        """Compute the batch's loss, and record it in the logbook with the metrics.

        Raises:
            ConfigurationError: the net, loss or metrics can't take the batch. The message speaks of
                what the user passed, and torch's own error is its cause.
        """
        x, y, weight = self.moved_parts(batch.data)
        if self.synchronization is not None:
            self.synchronization.counts = batch.samples > 0
        if not self.checked:
            self._check_batch(x, y, weight)
        try:
            with self._autocast(self._kind):
                if isinstance(x, torch.Tensor):
                    prediction = self.forward(x)
                else:
                    given, named = self.caller.arguments(x)
                    prediction = self.forward(*given, **named)
            prediction = self._widen(prediction)
            loss, parts = self._losses(prediction, x, y, weight)
        except Exception as error:
            self.explain(error, x, y)
            raise
        if self._sequences is not None:
            loss = self._mean_of_sequences(loss)
        self.note(batch, prediction, loss, parts, y, weight)
        return loss

    def note(
        self,
        batch: Batch,
        prediction: Any,
        loss: torch.Tensor,
        parts: dict[str, torch.Tensor],
        y: Any,
        weight: Any,
    ) -> None:
        """Add the results of a batch's step to the pass's values."""
        self.samples, self.total = batch.samples, batch.total
        if batch.samples == 0:
            self.count = None if self.count is None else 0
            return
        logbook, samples = self.logbook, self.samples
        if self.terms is not None:
            logbook.loss.last = loss.detach()
            logbook.add_terms(self.terms, samples)
        elif self._sequences is not None:  # each rank records the same
            count = samples if self.count is None else self.count
            logbook.loss.add(loss.detach(), count / self._sequences.size)
        else:
            logbook.loss.add(loss.detach(), samples if self.count is None else self.count)
        if parts:
            logbook.add_parts(parts, samples)
        if self.class_weights is not None:
            weight = self.loss.weigh(y, weight)
        if self.meters is not None:
            self.meters.update(prediction, y, weight)

    def again(self, batch: Batch, index: int = 0) -> torch.Tensor:
        """The batch's loss again, without recording it (LBFGS computes it several times)."""
        opened = self.moved_parts(batch.data)
        return self.compute(self.forward, *opened)[1]

    def run_first_checks(self, batch: Batch, wrapped: WrappedModel) -> None:
        """Run the first batch's checks with a batch that doesn't count.

        Args:
            wrapped: the model as evaluations call it: without DDP, but with gathering of sharded
                weights.
        """
        opened = self.moved_parts(batch.data)
        self.compute(forward_of(wrapped), *opened)

    def inside(self, model: Callable[..., Any], batch: Any, *, counts: bool) -> torch.Tensor:
        """The loss of a batch inside a step of the model's own. Only the metrics record it.

        Args:
            model: the model, or one of its replicas.
            batch: a batch on the device.
            counts: whether the metrics count it.
        """
        x, y, weight = self.parts(batch)
        # Replicas take turns at the first batch, whose checks build the metrics, and at their sums.
        with contextlib.nullcontext() if self.checked else self._replicas:
            prediction, loss, parts = self.compute(model, x, y, weight)
        self.inside_loss = loss
        with self._replicas, torch.no_grad():
            if counts and parts:
                self.logbook.add_parts(parts, samples_in(x, y))
            if counts and self.class_weights is not None:
                weight = self.loss.weigh(y, weight)
            if counts and self.meters is not None:
                self.meters.update(prediction, y, weight)
        return loss

    def moved_parts(self, batch: Any) -> tuple[Any, Any, Any]:
        """The batch's inputs, targets and weights, on the device."""
        return self.parts(self._move(batch))

    def parts(self, batch: Any) -> tuple[Any, Any, Any]:
        """The inputs, targets and weights of a batch that is on the device."""
        x, y, weight = self._unpack(batch)
        if y is None:
            y = labels_inside(x)
        if self._sequences is not None:
            if not self.checked:
                self._check_sequences(self._sequences, x, y)
            return self._sequences.divide(x, y, weight)
        return x, y, weight

    def compute(
        self, forward: Callable[..., Any], x: Any, y: Any, weight: Any
    ) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
        """The prediction, the loss and its parts by output, by another way to call the net."""
        if not self.checked:
            self._check_batch(x, y, weight)
        try:
            with self._autocast(self._kind):
                prediction = self.caller(forward, x)
            prediction = self._widen(prediction)
            loss, parts = self._losses(prediction, x, y, weight)
        except Exception as error:
            self.explain(error, x, y)
            raise
        if self._sequences is not None:
            loss = self._mean_of_sequences(loss)
        return prediction, loss, parts

    def _mean_of_sequences(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of whole sequences, from the loss of this rank's part."""
        assert self._sequences is not None
        if self.loss.has_several:
            raise ConfigurationError(
                "context_parallel trains a net with one loss, but there are several. Add them up "
                "in one function, or leave context_parallel out."
            )
        mean, self.count = self._sequences.mean(loss, self.count)
        return mean

    def _check_sequences(self, sequences: SequenceParts, x: Any, y: Any) -> None:
        """Refuse a net or a loss that can't be computed from parts of sequences."""
        if self.loss.own is not None:
            raise ConfigurationError(
                "A net that computes its own loss sees only a part of each sequence under "
                "context_parallel. Give compile a loss, and fit (x, y) with the label of each "
                "token in its place."
            )
        outputs = partial(_outputs_of, self)
        whole, y, part, y_part = sequences.check(outputs, x, y)
        if not self.loss.has_user_code:
            return
        with torch.no_grad():
            fresh = self.loss.begin()
            (term, *_) = fresh.terms(part, y_part, None, is_part=True)
            sequences.check_loss(
                fresh(whole, y)[0], term.scale * sequences.mean(term.value, term.count)[0]
            )

    def _losses(
        self, prediction: Any, x: Any, y: Any, weight: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its parts by output, after the first batch's checks."""
        if self.checked:
            if self.may_count:
                return self._counted(prediction, y, weight)
            return self.loss(prediction, y, weight)
        self._ask_net(prediction, x, y)
        self._check(prediction, x, y)
        found = self._losses(prediction, x, y, weight)
        self.loss.check_learns(found[0])
        return found

    def _check_batch(self, x: Any, y: Any, weight: Any) -> None:
        """Refuse an invalid first batch before the net gets it."""
        check_inputs(x, weight, self.name)
        if self.all_targets and self.all_targets[0] is None:  # the user named none, as for arrays
            warn_of_second_target(y, weight)

    def _counted(
        self, prediction: Any, y: Any, weight: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its parts, with what their means are taken over."""
        self.count = None
        if self.loss.has_several:
            terms = self.loss.terms(prediction, y, weight, is_part=self.is_part)
            if any(term.count is not None for term in terms):
                for term in terms:
                    term.count = number_of(term.count)
                self.terms = terms
                return total_of(terms), {}
            self.terms = None
            return total_of(terms), {term.name: term.value.detach() for term in terms}
        own, ranks = self.loss.own, self._ranks
        if own is not None and ranks is not None and not own.is_decided:
            own.count(prediction, y)
            own.agree(ranks)
        loss, count = self.loss.counted(prediction, y, weight, is_part=self.is_part)
        self.count = number_of(count)
        return loss, {}

    def _ask_net(self, prediction: Any, x: Any, y: Any) -> None:
        """Find out what a net's own loss is the mean over, by asking it in other ways."""
        own = self.loss.own
        if own is None or own.is_decided or not isinstance(x, Mapping):
            return
        net = self.wrapped.module

        def computed(inputs: Any) -> Any:
            with modes_restored(net), torch.no_grad(), self._autocast(self._kind):
                net.eval()
                return self._widen(self.caller(net, inputs))

        if takes_items_in_batch(net, self.caller, x):
            ask_for_sum(own, computed, x, y)
        # A net that ranks hold in parts must be called equally often on all of them.
        if not (own.is_decided or self._waits_for_ranks):
            ask_for_rows(own, computed, prediction, x, y, is_part=self.is_part)

    def counts_of(self, batch: Batch) -> list[float]:
        """What each output's mean will be taken over, for a batch that isn't computed yet."""
        _, y, _ = self._unpack(batch.data)
        samples, counts = batch.samples, self.loss.counts(trees.map_leaves(torch.as_tensor, y))
        return [float(samples if c is None or not samples else c) for c in counts]

    def explain(self, error: Exception, x: Any, y: Any) -> None:
        """Replace an error that a batch caused by a clearer one, if there is one."""
        if y is None and self._had_target:
            raise ConfigurationError(
                f"A batch of {self.name} has only inputs ({shape_words(x, 'x')}), but the first "
                "batch had targets too. Give (x, y) in each batch."
            ) from error
        needs = self.loss.own is None
        raise_explained(error, self.wrapped.module, x, y, self.name, needs_target=needs)

    def _check(self, prediction: Any, x: Any, y: Any) -> None:
        """Check the first batch for everything that shows before an update."""
        self.mover.transfer.note_writes()
        with torch.no_grad():
            self.loss.check(prediction, y)
            for targets in self.all_targets:
                self.loss.check_labels(targets)
            if self.meters is not None:
                hint = functools.partial(self.loss.hint, net=self.wrapped.module)
                self.meters.start(prediction, y, hint, self.loss.trained)
        self.checked = True
        self._had_target = y is not None


def _outputs_of(step: CompiledStep | PredictStep, forward: Callable[..., Any], x: Any) -> Any:
    """Call the net on inputs in a given way, in the step's precision."""
    with step._autocast(step._kind):
        return step._widen(step.caller(forward, x))


def number_of(count: Count) -> Count:
    """A count as a Python number, if reading it doesn't wait."""
    return count.item() if isinstance(count, torch.Tensor) and count.is_cpu else count


def labels_inside(x: Any) -> Any:
    """The targets that a dict batch has among its inputs; None if there are none."""
    if isinstance(x, Mapping):
        for key in LABEL_KEYS:
            if key in x:
                return x[key]
    return None


def unpacker_of(model: Module, name: str | None = None) -> Callable[[Any], tuple[Any, Any, Any]]:
    """The function that splits a model's batches into inputs, targets and weights.

    This is `unpack_batch`, or one that finds the targets of `compile(target=…)` among a dict's
    entries or an object's attributes. An object goes to the net whole.

    Args:
        name: the data's name for messages; None if the targets may be missing.
    """
    target = model._fitkit.compilation.target
    if target is None:
        return unpack_batch
    caller = caller_of(model)
    keys = set(trees.leaves(target))

    def taken_apart(batch: Any) -> tuple[Any, Any, Any]:
        x, y, weight = unpack_batch(batch)
        if not isinstance(x, Mapping):
            if y is None and keys and all(hasattr(x, str(key)) for key in keys):
                y = trees.map_leaves(lambda key: getattr(x, key), target)
            return x, y, weight
        if y is None and keys <= set(x):
            y = trees.map_leaves(lambda key: x[key], target)
        elif y is None and name is not None:
            raise ConfigurationError(
                f"compile was given target={target!r}, but a batch of {name} has the entries "
                f"{', '.join(map(repr, x))}."
            )
        inputs = {key: value for key, value in x.items() if key not in keys}
        if len(inputs) == 1:
            ((key, value),) = inputs.items()
            return (inputs if caller.takes(inputs, key) else value), y, weight
        return inputs, y, weight

    return taken_apart


def counter_of(model: Module) -> Callable[[Any], int]:
    """What counts the samples of a model's batches. Entries that disagree are said once."""
    compilation, doubts = model._fitkit.compilation, model._fitkit.doubts
    speaks = compilation.strategy.collectives.rank == 0
    unpack = None if compilation.target is None else unpacker_of(model)

    def samples_of(batch: Any) -> int:
        if (rows := plain_rows(batch)) is not None:
            return rows
        if unpack is not None and isinstance(batch, Mapping) and said_by(batch) is None:
            found = counted_in(*unpack(batch)[:2])
        else:
            found = counted(batch)
        if found.doubt is not None:
            doubts.note(found.doubt, speaks=speaks)
        return found.samples

    return samples_of


def check_inputs(x: Any, weight: Any, name: str) -> None:
    """Refuse a batch without a tensor of inputs, or with invalid weights.

    Raises:
        ConfigurationError: with what the batch holds.
    """
    if not any(isinstance(leaf, torch.Tensor) for leaf in trees.leaves(x)):
        plain = (int, float, str, bytes, type(None), np.ndarray)
        if all(isinstance(leaf, plain) for leaf in trees.leaves(x)):
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
    check_weights(
        weight,
        "A batch's third entry is the sample weights (several targets are (x, (y, y2))); it",
    )


class PredictStep:
    """Computes the net's outputs for batches.

    Args:
        model, wrapped: as in `CompiledStep`.
    """

    def __init__(self, model: Module, wrapped: WrappedModel) -> None:
        strategy: Strategy = model._fitkit.compilation.strategy
        self.wrapped = wrapped
        self.forward: Callable[..., Any] = forward_of(wrapped)
        self.caller: Caller = caller_of(model)
        self.mover: Mover = mover_of(model)
        self._unpack = unpacker_of(model)
        self._autocast, self._widen = strategy.precision.autocast, strategy.precision.widen
        self._kind = strategy.device.type
        self.checked: bool = False
        self._sequences = wrapped if isinstance(wrapped, SequenceParts) else None

    def __call__(self, batch: Batch, index: int = 0) -> Any:
        """The net's outputs for the batch's inputs. Targets and weights are ignored."""
        x, _, _ = self.moved_parts(batch.data)
        if not self.checked:
            check_inputs(x, None, "x")
        sequences = self._sequences
        if sequences is not None:
            if not self.checked:
                sequences.check(partial(_outputs_of, self), x)
            x, _, _ = sequences.divide(x)
        try:
            with self._autocast(self._kind):
                outputs = self._widen(self.caller(self.forward, x))
            if sequences is not None:
                outputs = sequences.join(outputs)
        except Exception as error:
            raise_explained(error, self.wrapped.module, x, None)
            raise
        if not self.checked:
            self.mover.transfer.note_writes()
            self.mover.transfer.undo_writes()
            self.checked = True
        return outputs

    def moved_parts(self, batch: Any) -> tuple[Any, Any, Any]:
        """The batch's inputs on the device, without the ignored rest."""
        return self._unpack(self.mover(batch))[0], None, None

    def inside(self, model: Callable[..., Any], batch: Any) -> Any:
        """The outputs of a batch that is on the device, inside a `predict_step`."""
        return self._widen(self.caller(model, self._unpack(batch)[0]))


def forward_of(wrapped: WrappedModel) -> Callable[..., Any]:
    """Return what calls a wrapped model: its network directly, if nothing is around it."""
    if not wrapped.is_bare:
        return partial(wrapped, "")
    model = wrapped.module
    if not is_plain_wrapper(model):
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


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a net's forward."""
    try:
        if inspect.ismethod(forward):
            found = _parameters(forward.__func__)
            takes_self = found and found[0].kind in POSITIONAL
            return list(found[1:] if takes_self else found)
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # TorchScript has no signature: then by position
        return [inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)]


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """A function's parameters; looking them up takes 100 µs."""
    return tuple(inspect.signature(function).parameters.values())


class Caller:
    """Calls a net with a batch's inputs.

    A tensor is the single input. A tuple or list is several inputs, a dict is inputs by keyword.
    A net that takes a single input gets a tuple, list or dict as a whole.

    Args:
        forward: the function whose signature decides (`net.forward`).
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = signature_of(forward)
        kinds = [parameter.kind for parameter in parameters]
        self._spread = inspect.Parameter.VAR_POSITIONAL in kinds
        self._any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
        self._positional = [item for item in parameters if item.kind in POSITIONAL]
        self._names = {item.name for item in parameters if item.kind in NAMED}
        self._required = [
            item.name
            for item in parameters
            if item.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
            and item.default is inspect.Parameter.empty
        ]

    def __call__(self, net: Callable[..., Any], x: Any) -> Any:
        """Call `net` on the inputs `x`."""
        given, named = self.arguments(x)
        return net(*given, **named)

    def arguments(self, x: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The net's arguments for the inputs `x`: by position, and by keyword."""
        if isinstance(x, Mapping) and self.by_keyword(x):
            return (), x
        if isinstance(x, (tuple, list)) and self.by_position(x):
            return x, {}
        return (x,), {}

    def by_keyword(self, x: Mapping[Any, Any]) -> bool:
        """Whether a dict's entries are separate arguments."""
        if not all(isinstance(key, str) for key in x):
            return False
        if not self._names:
            return self._any_keyword
        if len(self._names) == 1 and not self._any_keyword:
            return False  # a single input takes the whole dict
        keys = set(x)
        if keys.issuperset(self._required) and (keys <= self._names or self._any_keyword):
            return True
        return len(self._required) != 1

    def takes(self, x: Any, name: str) -> bool:
        """Whether inputs are passed by keyword, and one of this name may be among them."""
        return name in self._names and isinstance(x, Mapping) and self.by_keyword(x)

    def takes_any_keyword(self, x: Any) -> bool:
        """Whether inputs are passed by keyword, and others may be among them."""
        return self._any_keyword and isinstance(x, Mapping) and self.by_keyword(x)

    def by_position(self, x: tuple[Any, ...] | list[Any]) -> bool:
        """Whether a tuple's or list's entries are separate arguments."""
        if self._spread:
            return True
        if len(self._positional) <= 1:
            return False
        # With one required input, a tuple longer than the arguments can only be that input.
        return len(x) <= len(self._positional) or len(self._required) > 1


def caller_of(model: torch.nn.Module) -> Caller:
    """How the model takes inputs: by the signature of its own forward, or of its net's."""
    net = getattr(model, "net", None)
    forward = model.forward
    if isinstance(net, torch.nn.Module) and _spreads(forward):
        forward = net.forward
    return Caller(forward)


def _spreads(forward: Any) -> bool:
    """Whether a forward takes anything and passes it on."""
    kinds = {item.kind for item in signature_of(forward)}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def mover_of(model: Module) -> Mover:
    """The mover of batches to the model's device, in the model's dtype."""
    compilation = model._fitkit.compilation
    strategy, word = compilation.strategy, compilation.memory_format
    format_of_images = None if word is None else MEMORY_FORMATS[word]
    labels = (*LABEL_KEYS, *trees.leaves(compilation.target or ()))
    dtype = strategy.precision.input_dtype(model)
    transfer = Transfer(strategy.device, dtype, format_of_images, labels)
    own = model.transfer_batch_to_device if overridden(model, "transfer_batch_to_device") else None
    return Mover(transfer, own)
