"""The step of a pass: the compiled one, or the hooks that a model defines, and what these know."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from fitkit import trees
from fitkit.arguments import describe
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Batch, Source
from fitkit.data.sources import targets_of
from fitkit.data.to_device import Mover, moved_by
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.rows import mean_by
from fitkit.distributed.spread.context_parallel import SequenceParts
from fitkit.distributed.sync_batchnorm import Synchronization
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import has_own_steps, overridden, step_arguments
from fitkit.losses import Count, Term, checked_count
from fitkit.losses.class_weights import ClassWeights
from fitkit.module import LogOptions, Module, is_metric
from fitkit.training.jit.programs import compiles_updates, traces_gradients
from fitkit.training.log import Logbook, Logged
from fitkit.training.step import CompiledStep, PredictStep
from fitkit.training.with_gradients import wrapped_for_evaluation


@dataclasses.dataclass
class StepContext:
    """One pass over data: an epoch's training, a validation, `evaluate`, `predict`.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        logged: the values of `self.log`.
        compiled: computes the compiled loss, which hooks get by `super().training_step(…)`. None in
            `predict`.
        predicting: computes the net's outputs, which `predict_step` gets by `super()`. None except
            in `predict`.
        samples: the samples of the current batch, on this rank.
        seen: the samples of the pass so far, on this rank.
        is_over: whether the hook at the end of the pass runs.
        is_padding: whether the current batch is padding, which doesn't count.
        is_opening: whether hooks run before a batch whose samples aren't known yet.
        waiting: the values that they logged, until `take_waiting`.
        ending: the values logged by a hook that is called with the pass's values; otherwise None.
        backward: computes a loss's gradients and averages them over the ranks; training only.
    """

    name: str
    logged: Logged = dataclasses.field(default_factory=Logged)
    compiled: CompiledStep | None = None
    predicting: PredictStep | None = None
    samples: int = 0
    seen: int = 0
    is_over: bool = False
    is_padding: bool = False
    is_opening: bool = False
    waiting: list[tuple[str, Any, LogOptions, int | None]] = dataclasses.field(default_factory=list)
    ending: Logged | None = None
    backward: Callable[..., None] | None = None

    @staticmethod
    def moved(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """A batch moved by a model's own hook."""
        return moved_by(own, batch, device)

    def transferred(self, batch: Any) -> Any:
        """A batch moved to the device in fitkit's way."""
        step = self.compiled or self.predicting
        assert step is not None
        return step.mover.transfer(batch)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The compiled loss of a batch that is on the device; compiled metrics count it."""
        assert self.compiled is not None
        return self.compiled.inside(model, batch, counts=not self.is_padding)

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """The net's outputs for a batch that is on the device."""
        assert self.predicting is not None
        return self.predicting.inside(model, batch)

    def call_before_batch(self, hooks: Iterable[Callable[..., Any]], *arguments: Any) -> None:
        """Call hooks before a batch. What they log counts with that batch's samples."""
        self.is_opening = True
        for hook in hooks:
            hook(*arguments)
        self.is_opening = False

    def call_at_end(
        self,
        hooks: Iterable[Callable[..., Any]],
        values: dict[str, Any],
        ranks: Collectives,
        *arguments: Any,
    ) -> None:
        """Call hooks with a pass's values. What one logs is added to the values for the next.

        Args:
            hooks: the callbacks' hooks, in their order.
            values: the pass's values. They stay the same on all ranks.
            ranks: the ranks that call the hooks, too.
            *arguments: the hooks' own arguments.

        Ranks:
            Collective: one exchange per hook that isn't fitkit's own, because its code may log.
        """
        for hook in hooks:
            self.ending = Logged()
            try:
                hook(*arguments)
            finally:
                ending, self.ending = self.ending, None
            states, numbers = [ending.state()], [ranks.rank]
            is_ours = (getattr(hook, "__module__", None) or "").startswith("fitkit.")
            if ranks.world_size > 1 and not is_ours:
                states, numbers = ranks.gather(states[0]), list(range(ranks.world_size))
            if any(states):
                values.update(ending.merge(states, [1] * len(states), numbers))
                ending.finish()

    def log(self, name: str, value: Any, options: LogOptions, samples: int | None) -> None:
        """Record a value that a hook logs, unless its batch doesn't count.

        Raises:
            ConfigurationError: called in `predict`, or `Logged.add` refuses the value.
        """
        if self.name == "predict":
            raise ConfigurationError(
                f"self.log({name!r}) was called in predict, which has no logs. Return the value "
                "from predict_step, or log it in test_step and call evaluate."
            )
        if self.ending is not None:
            self.ending.add(name, value, options, 1 if samples is None else samples)
            return
        if self.is_opening:
            self.waiting.append((name, value, options, samples))
            return
        own_steps = self.samples or self.seen
        batch = self.samples if own_steps or self.compiled is None else self.compiled.samples
        if self.is_padding or (batch == 0 and not self.is_over):
            return
        if samples is None:
            # A value logged at the end of a pass stands for all samples of this rank.
            samples = max(self.seen, 1) if self.is_over else batch
        self.logged.add(name, value, options, samples)

    def take_waiting(self) -> None:
        """Record what was logged before the current batch, now that its samples are known."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self.log(*entry)


Cleanups = tuple[contextlib.ExitStack, contextlib.ExitStack]


class StepContexts:
    """The contexts of the calls that run on a model, one per thread. A copy of a model has none.

    Attributes:
        by_thread: the contexts, by thread number.
        cleanups_by_thread: the clean-ups of the innermost run in each thread: those that come
            last, and those of callbacks with `swaps_weights`, which come first.
        placing: a lock held while a thread moves the model to its device.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, StepContext] = {}
        self.cleanups_by_thread: dict[int, Cleanups] = {}
        self.placing: Any = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepContexts, ()

    @property
    def cleanups(self) -> Cleanups | None:
        """What this thread's innermost run on the model undoes at its end; None without a run."""
        return self.cleanups_by_thread.get(threading.get_ident())

    def put_cleanups(self, cleanups: Cleanups | None) -> None:
        """Set what `cleanups` gives in this thread."""
        if cleanups is None:
            self.cleanups_by_thread.pop(threading.get_ident(), None)
        else:
            self.cleanups_by_thread[threading.get_ident()] = cleanups

    @property
    def current(self) -> StepContext | None:
        """This thread's context. A helper thread (of a replica or autograd) gets the context of the
        thread that it helps, if only one is possible."""
        found = self.by_thread.get(threading.get_ident())
        if found is None and len(contexts := list(self.by_thread.values())) == 1:
            return contexts[0]
        return found


class running(contextlib.AbstractContextManager[StepContext]):  # noqa: N801
    """Make a context the model's current one in this thread. Calls may nest."""

    __slots__ = ("_before", "_context", "_contexts")

    def __init__(self, model: Module, context: StepContext) -> None:
        self._contexts: dict[int, StepContext] = model._fitkit.contexts.by_thread
        self._context = context

    def __enter__(self) -> StepContext:
        thread = threading.get_ident()
        self._before = self._contexts.get(thread)
        self._contexts[thread] = self._context
        return self._context

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if self._before is None:
            del self._contexts[thread]
        else:
            self._contexts[thread] = self._before


def step_for(
    model: Module,
    stage: str,
    *,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    source: Source | None = None,
) -> tuple[StepContext, Step]:
    """The step of a stage: `compile`'s, or the model's own where it has hooks for the stage."""
    compilation = model._fitkit.compilation
    strategy = compilation.strategy
    known = None if source is None else [targets_of(source)]
    may_count = compilation.loss.may_count(known)
    counts = may_count or has_own_steps(model, stage)
    if stage == "training":
        wrapped = strategy.wrap_for_training(
            model,
            averages=model._updates_all,
            may_count=counts,
            compiles=compiles_updates(model) and traces_gradients(),
        )
    else:
        wrapped = wrapped_for_evaluation(model)
    _check_undivided(model, wrapped, stage)
    compiled = CompiledStep(
        model,
        wrapped,
        class_weights=class_weights,
        all_targets=all_targets,
        name=name,
        ranks=strategy.data_ranks if stage == "training" else None,
        may_count=may_count,
        keeps_batches=source is not None and isinstance(source.whole, ArraySource),
    )
    context = StepContext(stage, compiled.logbook.logged, compiled)
    by_turns = stage == "training" and not model._updates_all
    moves_parts = strategy.replicates and overridden(model, "transfer_batch_to_device")
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return context, compiled
    return context, OwnStep(model, context, wrapped)


def predict_step_for(model: Module) -> tuple[StepContext, Any]:
    """The step of `predict`."""
    wrapped = wrapped_for_evaluation(model)
    _check_undivided(model, wrapped, "predict")
    compiled = PredictStep(model, wrapped)
    context = StepContext("predict", predicting=compiled)
    if has_own_steps(model, "predict"):
        return context, OwnPredictStep(model, context, wrapped)
    return context, compiled


def _check_undivided(model: Module, wrapped: WrappedModel, stage: str) -> None:
    """Refuse steps of the model's own where ranks divide sequences: they would see parts."""
    if isinstance(wrapped, SequenceParts) and has_own_steps(model, stage):
        raise ConfigurationError(
            f"{stage}_step and its hooks would see only a rank's part of each sequence under "
            "context_parallel. Give compile the loss and the metrics instead."
        )


class OwnStep:
    """Computes batches' losses by the hooks that the model defines, and keeps the running values.

    In training these are `training_step` and `training_step_end`, and `training_epoch_end` gets at
    the pass's end what they returned; `validation_` and `test_` have the same three.

    Args:
        model: has the hooks.
        context: what the hooks need to know; its name says which three they are.
        wrapped: calls the step, as the strategy wants it called.

    Attributes:
        samples: of the last batch on this rank; 0 where it was padding.
        total: of the last batches on all ranks.
        count, terms, may_count, is_part: as in `CompiledStep`.
        synchronization: what synchronised batch normalisations go by; None where there are none.
        ranks: those that see different data.
        keeps: whether the pass's `_epoch_end` wants what the steps returned.
        outputs: what they returned; None where nobody wants it.
    """

    def __init__(self, model: Module, context: StepContext, wrapped: WrappedModel) -> None:
        assert context.compiled is not None
        stage, strategy = context.name, model._fitkit.compilation.strategy
        self.model = model
        self.context = context
        self.wrapped = wrapped
        self.mover: Mover = context.compiled.mover
        self.logbook: Logbook = context.compiled.logbook
        self.samples: int = 0
        self.total: int = 0
        self.count: Count = None
        self.terms: list[Term] | None = None
        self.may_count: bool = True
        self.outputs: list[Any] | None = None
        self.synchronization: Synchronization | None = None
        self.ranks: Collectives = strategy.data_ranks
        autocast = strategy.precision.autocast
        self.autocast: Callable[..., Any] = partial(autocast, strategy.device.type)
        self._method = f"{stage}_step"
        self._arguments = step_arguments(model, self._method)
        self.enter_again()
        self._end = getattr(model, f"{stage}_step_end")
        self._has_end = overridden(model, f"{stage}_step_end")
        # A transfer of the model's own is part of what is called through a wrapper: under dp each
        # replica brings its part to its own device.
        self._moves = overridden(model, "transfer_batch_to_device")
        self._needs_loss = stage == "training" and model.automatic_optimization
        self._is_first = True
        self.keeps: bool = overridden(model, f"{stage}_epoch_end")
        self.begin()

    def enter_again(self) -> None:
        """Call the model's step as the model is wrapped now."""
        self.enter: Callable[..., Any] = entry_of(self.model, self.wrapped, self._method)

    @property
    def is_part(self) -> bool:
        """As in `CompiledStep`, whose loss the hooks may ask for."""
        assert self.context.compiled is not None
        return self.context.compiled.is_part

    @is_part.setter
    def is_part(self, is_part: bool) -> None:
        assert self.context.compiled is not None
        self.context.compiled.is_part = is_part

    def begin(self) -> None:
        """Begin a new pass."""
        self.logbook.reset()
        self.context.seen = 0
        self.outputs = [] if self.keeps else None

    def finish(self) -> None:
        """Call the pass's `_epoch_end`."""
        self._warn_of_silence()
        if self.outputs is None:
            return
        outputs, self.outputs = self.outputs, []
        context = self.context
        context.is_padding, context.is_over = False, True
        try:
            getattr(self.model, f"{context.name}_epoch_end")(outputs)
        finally:
            context.is_over = False

    def _warn_of_silence(self) -> None:
        """Say what an epoch shows of things that went nowhere."""
        compiled = self.context.compiled
        if self._needs_loss and self.context.seen and self.logbook.loss.last is None:
            warn(
                "training_step returned None for every batch, so nothing was learned. Return the "
                "loss.",
                code="FK025",
            )
        if compiled is not None and compiled.class_weights is not None and not compiled.checked:
            warn(
                "class_weight has no effect, because training_step computes the loss itself. The "
                "weights apply only in super().training_step."
            )

    def __call__(
        self, batch: Batch, index: int, optimizer_idx: int = 0, *, counts: bool = True
    ) -> torch.Tensor | None:
        """The batch's loss, if it has one, noted in the logbook.

        Args:
            counts: whether the batch counts; else it leaves no trace but its gradients.

        Raises:
            ConfigurationError: a training step gave no loss that can be learned from.
        """
        context = self.context
        self.samples, self.total = batch.samples, batch.total
        context.samples = batch.samples
        is_padding = batch.samples == 0
        context.is_padding = is_padding or not counts
        if self.synchronization is not None:
            self.synchronization.counts = not is_padding
        if context.waiting and counts:
            context.take_waiting()  # before the ranks exchange the step's values
        with _metrics_restored(self.model) if context.is_padding else contextlib.nullcontext():
            moved = batch.data if self._moves else self.mover.transfer(batch.data)
            with self.autocast():
                outputs = self.enter(moved, *self.arguments(index, optimizer_idx))
                outputs = self.ended(outputs)
            if self._is_first:
                self.mover.transfer.note_writes()
            loss = self._loss(outputs)
        context.is_padding = is_padding
        if not counts:
            return loss
        if is_padding:
            self.count = None if self.count is None else 0
            self.logbook.padding += 1
        else:
            self.note(loss, outputs)
        if context.name == "training":  # elsewhere ranks may make unequal numbers of steps
            context.logged.exchange(self.ranks, is_padding=is_padding)
        return loss

    def take(self, batch: Batch, count: Any, *, is_compiled_loss: bool) -> None:
        """Take a batch whose step was computed elsewhere: it counts from now on.

        Args:
            count: what the step said that its loss is the mean over; None where it didn't.
            is_compiled_loss: whether the step returned what `super().training_step` gave.
        """
        context = self.context
        self.samples, self.total = batch.samples, batch.total
        context.samples, context.is_padding = self.samples, False
        if context.waiting:
            context.take_waiting()
        self.count = self.terms = None
        if count is not None:
            self.count = checked_count(count, f"{self._method} returned 'count'")
        elif is_compiled_loss and context.compiled is not None:
            self.count, self.terms = context.compiled.count, context.compiled.terms

    def note(self, loss: torch.Tensor | None, outputs: Any) -> None:
        """Take a batch's loss, and what its step returned, into the pass's values."""
        context = self.context
        context.seen += self.samples
        if loss is not None:
            weight = self.samples if self.count is None else self.count
            self.logbook.loss.add(loss.detach(), weight)
        if self.outputs is not None:
            outputs = _without_gradients(outputs, training=context.name == "training")
            self.outputs.append(trees.kept(outputs))

    def arguments(self, index: int, optimizer_idx: int = 0) -> list[int]:
        """What the model's step wants to know beside the batch."""
        values = {"batch_idx": index, "optimizer_idx": optimizer_idx}
        return [values[name] for name in self._arguments]

    def ended(self, outputs: Any) -> Any:
        """What the step returned, as its `_step_end` or the replicas' mean makes it."""
        if self._has_end:
            return self._end(outputs)
        if self.wrapped.weights is not None:
            return with_mean_loss(outputs, self.wrapped.weights)
        return outputs

    def again(self, batch: Batch, index: int, optimizer_idx: int = 0) -> torch.Tensor:
        """The batch's loss once more, noted nowhere (LBFGS computes it several times)."""
        loss = self(batch, index, optimizer_idx, counts=False)
        assert loss is not None
        return loss

    def undo_writes(self) -> None:
        """Undo what the first batch's step did to the data's memory."""
        self.mover.transfer.undo_writes()

    def _loss(self, outputs: Any) -> torch.Tensor | None:
        found = loss_in(outputs)
        loss = None
        self.count = self._count(outputs, found)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            loss = found.reshape(())
        elif self.context.name != "training" and isinstance(found, float):
            loss = torch.tensor(found)
        if self._needs_loss and outputs is not None and (self._is_first or loss is None):
            self._check(loss, found, outputs)
        self._is_first = False
        return loss

    def _count(self, outputs: Any, loss: Any) -> Count:
        """What the step's loss was the mean over: as the step says it, or as the compiled loss."""
        if isinstance(outputs, Mapping) and outputs.get("count") is not None:
            return checked_count(outputs["count"], f"{self._method} returned 'count'")
        self.terms = None
        compiled = self.context.compiled
        if compiled is None or loss is None or compiled.inside_loss is not loss:
            return None
        self.terms = compiled.terms
        return compiled.count

    def counts_of(self, batch: Batch) -> list[float]:
        """As `CompiledStep.counts_of`, where the compiled loss is what the step returns."""
        assert self.context.compiled is not None
        return self.context.compiled.counts_of(batch)

    def _check(self, loss: torch.Tensor | None, found: Any, outputs: Any) -> None:
        """Refuse what can't be learned from."""
        hooks = "training_step_end" if self._has_end else "training_step"
        if loss is None:
            what = "a dict without 'loss'" if isinstance(outputs, Mapping) else describe(found)
            if isinstance(found, torch.Tensor):
                what = f"a tensor of shape {tuple(found.shape)}"
            raise ConfigurationError(
                f"{hooks} returned {what}. Return the loss as a tensor with one number, for "
                "example its .mean(), or a dict that has it as 'loss'."
            )
        if not loss.requires_grad:
            raise ConfigurationError(
                f"The loss that {hooks} returned has no gradient, so the net can't learn from it. "
                "Compute it from the net's output, without .item(), .detach() or no_grad."
            )


def loss_in(outputs: Any) -> Any:
    """What a step's outputs have as the loss."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return getattr(found, "loss", found)  # an object with .loss, as Hugging Face's


def with_mean_loss(outputs: Any, weights: list[int]) -> Any:
    """Gathered outputs with the replicas' losses as their mean, by their counts or samples."""
    if isinstance(outputs, Mapping):
        if not isinstance(outputs.get("loss"), torch.Tensor):
            return outputs
        counts = outputs.get("count")
        if isinstance(counts, torch.Tensor) and counts.shape == (len(weights),):
            loss = with_mean_loss(outputs["loss"], list(counts))
            return {**outputs, "loss": loss, "count": counts.sum()}
        return {**outputs, "loss": with_mean_loss(outputs["loss"], weights)}
    if isinstance(outputs, torch.Tensor) and outputs.shape == (len(weights),):
        return mean_by(outputs, weights)
    return outputs


class _Loss(torch.Tensor):
    """A loss that `training_epoch_end` may also take for the dict that Lightning makes of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        return self if key == "loss" else super().__getitem__(key)


def _without_gradients(outputs: Any, *, training: bool) -> Any:
    """A step's outputs without gradients."""
    if training and isinstance(outputs, torch.Tensor):
        return outputs.detach().as_subclass(_Loss)
    return trees.map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs
    )


@contextlib.contextmanager
def _metrics_restored(model: torch.nn.Module) -> Iterator[None]:
    """Let a batch that counts for nothing leave the model's torchmetrics objects as they are."""
    metrics: list[Any] = [module for module in model.modules() if is_metric(module)]
    before = [(metric._copy_state_dict(), metric._update_count) for metric in metrics]
    try:
        yield
    finally:
        for metric, (state, count) in zip(metrics, before, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None


class OwnPredictStep:
    """Computes batches' outputs by the model's `predict_step` and `predict_step_end`.

    Args:
        model, context, wrapped: as in `OwnStep`.
    """

    def __init__(self, model: Module, context: StepContext, wrapped: WrappedModel) -> None:
        assert context.predicting is not None
        strategy = model._fitkit.compilation.strategy
        self.model = model
        self.context = context
        self.wrapped = wrapped
        self.mover: Mover = context.predicting.mover
        self._autocast = partial(strategy.precision.autocast, strategy.device.type)
        self._takes_index = "batch_idx" in step_arguments(model, "predict_step")
        self.enter_again()
        self._end = model.predict_step_end
        self._moves = overridden(model, "transfer_batch_to_device")
        self._is_first = True

    def enter_again(self) -> None:
        """Call the model's step as the model is wrapped now."""
        self._enter = entry_of(self.model, self.wrapped, "predict_step")

    def __call__(self, batch: Batch, index: int = 0) -> Any:
        """The outputs for a batch."""
        arguments = (index,) if self._takes_index else ()
        self.context.samples = batch.samples
        with self._autocast():
            moved = batch.data if self._moves else self.mover.transfer(batch.data)
            outputs = self._end(self._enter(moved, *arguments))
        if self._is_first:
            self.mover.transfer.note_writes()
            self.mover.transfer.undo_writes()
            self._is_first = False
        return outputs


Step = CompiledStep | OwnStep
"""A batch's step: as `compile` describes it, or by the model's own hooks."""


def entry_of(model: Module, wrapped: WrappedModel, method: str) -> Callable[..., Any]:
    """How to call a step of a wrapped model: the step itself where nothing stands
    between."""
    if overridden(model, "transfer_batch_to_device"):

        def enter(batch: Any, *arguments: Any) -> Any:
            return wrapped("_step_on_device", batch, method, *arguments)

        return enter
    if wrapped.is_bare:
        step: Callable[..., Any] = getattr(model, method)
        return step
    return partial(wrapped, method)
