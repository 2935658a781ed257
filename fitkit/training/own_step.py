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
from fitkit.distributed.sync_batchnorm import Synchronization
from fitkit.distributed.wrapped_model import DividedModel, ReplicatedModel, WrappedModel
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import has_own_steps, overridden, step_arguments
from fitkit.losses import checked_count
from fitkit.losses.class_weights import ClassWeights
from fitkit.module import LogOptions, Module, is_metric
from fitkit.record import Context
from fitkit.training.compiler import compiler_of
from fitkit.training.log import Logbook, Logged
from fitkit.training.step import CompiledStep, Outcome
from fitkit.training.with_gradients import wrapped_for_evaluation


@dataclasses.dataclass
class StepContext:
    """One pass over data: an epoch's training, a validation, `evaluate`, `predict`.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        logged: the values of `self.log`.
        compiled: computes what hooks get by `super()`: the compiled loss, or in `predict` the net's
            outputs.
        batch: the current batch, from its first hook on; None before a pass's first.
        is_part: whether it is only a part of an update's samples.
        is_silent: whether it is computed once more, and leaves no trace.
        inside: what `super().training_step(…)` found in it; None if it wasn't called.
        seen: the samples of the pass so far, on this rank.
        is_over: whether the hook at the end of the pass runs.
        waiting: the values that hooks logged before the first batch, with which they count.
        ending: the values logged by a hook that is called with the pass's values; otherwise None.
        backward: computes a loss's gradients and averages them over the ranks; training only.
        transfer: the data's own way to move a batch; None leaves that to the model.
    """

    name: str
    logged: Logged
    compiled: CompiledStep
    batch: Batch | None = None
    is_part: bool = False
    is_silent: bool = False
    inside: Outcome | None = None
    seen: int = 0
    is_over: bool = False
    waiting: list[tuple[str, Any, LogOptions, int | None]] = dataclasses.field(default_factory=list)
    ending: Logged | None = None
    backward: Callable[..., None] | None = None
    transfer: Callable[[Any, torch.device], Any] | None = None

    def moved(self, own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """Return a batch moved by the data's own way, or else by a model's hook."""
        return moved_by(self.transfer or own, batch, device)

    def transferred(self, batch: Any) -> Any:
        """Return a batch moved to the device in fitkit's way."""
        return self.compiled.mover.transfer(batch)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the compiled loss of a batch that is on the device; compiled metrics count it."""
        counts = not self.is_silent and self.batch is not None and self.batch.samples > 0
        found = self.compiled.inside(model, batch, is_part=self.is_part, counts=counts)
        self.inside = found
        assert found.loss is not None
        return found.loss

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """Return the net's outputs for a batch that is on the device."""
        return self.compiled.outputs_inside(model, batch)

    def begin(self) -> None:
        """Begin a new pass."""
        self.batch, self.seen = None, 0

    def log_waiting(self) -> None:
        """Record what hooks logged before the first batch, now that its samples are known."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self.log(*entry)

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
        if self.batch is None and not self.is_over:
            self.waiting.append((name, value, options, samples))
            return
        batch = 0 if self.batch is None else self.batch.samples
        if self.is_silent or (batch == 0 and not self.is_over):
            return
        if samples is None:
            # A value logged at the end of a pass stands for all samples of this rank.
            samples = max(self.seen, 1) if self.is_over else batch
        self.logged.add(name, value, options, samples)


class running(contextlib.AbstractContextManager[StepContext]):  # noqa: N801
    """Make a context the model's current one in this thread. Calls may nest."""

    __slots__ = ("_before", "_context", "_contexts")

    def __init__(self, model: Module, context: StepContext) -> None:
        self._contexts: dict[int, Context] = model._fitkit.contexts.by_thread
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
    """Return a stage's step: `compile`'s, or the model's own where it has hooks for it."""
    compilation = model._fitkit.compilation
    strategy = compilation.strategy
    known = None if source is None else [targets_of(source)]
    may_count = compilation.loss.may_count(known)
    counts = may_count or has_own_steps(model, stage)
    if stage == "training":
        if (outer := model._fitkit.fit_state.run) is not None:
            outer.follow_freezing()  # a callback trains the model, by that run's wrapper
        compiler = compiler_of(model)
        wrapped = strategy.wrap_for_training(
            model,
            averages=model._updates_all,
            may_count=counts,
            compiles=compiler is not None and compiler.compiles_updates(model),
        )
    else:
        wrapped = wrapped_for_evaluation(model)
    _check_undivided(model, wrapped, stage)
    transfer = None if source is None else source.whole.transfer
    compiled = CompiledStep(
        model,
        wrapped,
        class_weights=class_weights,
        all_targets=all_targets,
        name=name,
        ranks=strategy.data_ranks if stage == "training" else None,
        may_count=may_count,
        keeps_batches=source is not None and isinstance(source.whole, ArraySource),
        transfer=transfer,
    )
    context = StepContext(stage, compiled.logbook.logged, compiled, transfer=transfer)
    by_turns = stage == "training" and not model._updates_all
    moves_parts = strategy.replicates and not compiled.mover.is_ours
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return context, compiled
    return context, OwnStep(model, context, wrapped)


def predict_step_for(model: Module, source: Source | None = None) -> tuple[StepContext, Step]:
    """Return the step of `predict`."""
    wrapped = wrapped_for_evaluation(model)
    _check_undivided(model, wrapped, "predict")
    transfer = None if source is None else source.whole.transfer
    compiled = CompiledStep(
        model,
        wrapped,
        predicts=True,
        keeps_batches=source is not None and isinstance(source.whole, ArraySource),
        transfer=transfer,
    )
    context = StepContext("predict", compiled.logbook.logged, compiled, transfer=transfer)
    if has_own_steps(model, "predict"):
        return context, OwnStep(model, context, wrapped)
    return context, compiled


def _check_undivided(model: Module, wrapped: WrappedModel, stage: str) -> None:
    """Refuse steps of the model's own where ranks divide sequences: they would see parts."""
    if isinstance(wrapped, DividedModel) and has_own_steps(model, stage):
        raise ConfigurationError(
            f"{stage}_step and its hooks would see only a rank's part of each sequence under "
            "context_parallel. Give compile the loss and the metrics instead."
        )


class OwnStep:
    """Computes batches by the hooks that the model defines, and keeps the running values.

    In training these are `training_step` and `training_step_end`, and `training_epoch_end` gets at
    the pass's end what they returned; `validation_` and `test_` have the same three, and `predict_`
    has the first two.

    Args:
        model: has the hooks.
        context: what the hooks need to know; its name says which three they are.
        wrapped: calls the step, as the strategy wants it called.

    Attributes:
        may_count: as in `CompiledStep`, whose loss the hooks may ask for.
        synchronization: what synchronised batch normalisations go by; None where there are none.
        ranks: those that see different data.
        keeps: whether the pass's `_epoch_end` wants what the steps returned.
        outputs: what they returned; None where nobody wants it.
    """

    def __init__(self, model: Module, context: StepContext, wrapped: WrappedModel) -> None:
        stage, strategy = context.name, model._fitkit.compilation.strategy
        self.model = model
        self.context = context
        self.wrapped = wrapped
        self.mover: Mover = context.compiled.mover
        self.logbook: Logbook = context.compiled.logbook
        self.may_count: bool = True
        self.outputs: list[Any] | None = None
        self.synchronization: Synchronization | None = None
        self.ranks: Collectives = strategy.data_ranks
        autocast = strategy.precision.autocast
        self.autocast: Callable[..., Any] = partial(autocast, strategy.device.type)
        self.method: str = f"{stage}_step"
        self._arguments = step_arguments(model, self.method)
        self.enter_again()
        self._end = getattr(model, f"{stage}_step_end")
        self._has_end = overridden(model, f"{stage}_step_end")
        # A transfer of the model's own is part of what is called through a wrapper: under dp each
        # replica brings its part to its own device.
        self._moves = not self.mover.is_ours
        self._has_loss = stage != "predict"
        self._needs_loss = stage == "training" and model.automatic_optimization
        self._is_first = True
        self.keeps: bool = self._has_loss and overridden(model, f"{stage}_epoch_end")
        self.begin()

    def enter_again(self) -> None:
        """Call the model's step as the model is wrapped now."""
        self.enter: Callable[..., Any] = entry_of(
            self.model, self.wrapped, self.method, moves=not self.mover.is_ours
        )

    def begin(self) -> None:
        """Begin a new pass."""
        self.logbook.reset()
        self.outputs = [] if self.keeps else None

    def finish(self) -> None:
        """Call the pass's `_epoch_end`."""
        self._warn_of_silence()
        if self.outputs is None:
            return
        outputs, self.outputs = self.outputs, []
        context = self.context
        context.is_over = True
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
        if compiled.class_weights is not None and not compiled.checked:
            warn(
                "class_weight has no effect, because training_step computes the loss itself. The "
                "weights apply only in super().training_step."
            )

    def __call__(
        self, batch: Batch, index: int = 0, optimizer_idx: int = 0, *, is_part: bool = False
    ) -> Outcome:
        """Return what the model's step gives for a batch.

        Args:
            is_part: whether the batch is only a part of an update's samples.

        Raises:
            ConfigurationError: a training step gave no loss that can be learned from.
        """
        context, is_padding = self.context, batch.samples == 0
        context.is_part, context.inside = is_part, None
        if self.synchronization is not None:
            self.synchronization.counts = not is_padding
        leaves_no_trace = self._has_loss and (is_padding or context.is_silent)
        with _metrics_restored(self.model) if leaves_no_trace else contextlib.nullcontext():
            moved = batch.data if self._moves else self.mover.transfer(batch.data)
            with self.autocast():
                outputs = self.enter(moved, *self.arguments(index, optimizer_idx))
                outputs = self.ended(outputs)
            if self._is_first:
                self.mover.transfer.note_writes()
            found = self._outcome(outputs) if self._has_loss else Outcome(None, outputs=outputs)
        self._is_first = False
        return found

    def again(
        self, batch: Batch, index: int, optimizer_idx: int = 0, *, is_part: bool = False
    ) -> torch.Tensor:
        """Return the batch's loss once more (LBFGS computes it several times)."""
        self.context.is_silent = True
        try:
            loss = self(batch, index, optimizer_idx, is_part=is_part).loss
        finally:
            self.context.is_silent = False
        assert loss is not None
        return loss

    def record(self, batch: Batch, outcome: Outcome) -> None:
        """Take a batch's loss, and what its step returned, into the pass's values.

        Ranks:
            Collective in training, if the step logs values that the ranks exchange in each step.
        """
        context, logbook, samples = self.context, self.logbook, batch.samples
        logbook.samples = samples
        if samples == 0:
            logbook.padding += 1
        else:
            context.seen += samples
            if outcome.loss is not None:
                count = outcome.count
                logbook.loss.add(outcome.loss.detach(), samples if count is None else count)
            if self.outputs is not None:
                outputs = _without_gradients(outcome.outputs, training=context.name == "training")
                self.outputs.append(trees.kept(outputs))
        if context.name == "training":  # elsewhere ranks may make unequal numbers of steps
            context.logged.exchange(self.ranks, is_padding=samples == 0)

    def join_losses(self) -> None:
        """Do nothing: the model's own code computes each loss."""

    def arguments(self, index: int, optimizer_idx: int = 0) -> list[int]:
        """Return what the model's step wants to know beside the batch."""
        values = {"batch_idx": index, "optimizer_idx": optimizer_idx}
        return [values[name] for name in self._arguments]

    def ended(self, outputs: Any) -> Any:
        """Return what the step returned, as its `_step_end` or the replicas' mean makes it."""
        if self._has_end:
            return self._end(outputs)
        if self._has_loss and isinstance(self.wrapped, ReplicatedModel):
            return with_mean_loss(outputs, self.wrapped.weights)
        return outputs

    def undo_writes(self) -> None:
        """Undo what the first batch's step did to the data's memory."""
        self.mover.transfer.undo_writes()

    def _outcome(self, outputs: Any) -> Outcome:
        found = loss_in(outputs)
        loss = None
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            loss = found.reshape(())
        elif self.context.name != "training" and isinstance(found, float):
            loss = torch.tensor(found)
        if self._needs_loss and outputs is not None and (self._is_first or loss is None):
            self._check(loss, found, outputs)
        (inside, self.context.inside), said = (self.context.inside, None), said_count(outputs)
        if said is not None:
            count = checked_count(said, f"{self.method} returned 'count'")
            return Outcome(loss, count, outputs=outputs)
        if inside is None or inside.loss is not found:
            return Outcome(loss, outputs=outputs)
        return Outcome(loss, inside.count, inside.terms, outputs)

    def counts_of(self, batch: Batch) -> list[float]:
        """As `CompiledStep.counts_of`, where the compiled loss is what the step returns."""
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


def said_count(outputs: Any) -> Any:
    """Return what a step's outputs say that the loss is the mean over; None where they don't."""
    return outputs.get("count") if isinstance(outputs, Mapping) else None


def loss_in(outputs: Any) -> Any:
    """Return what a step's outputs have as the loss."""
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
    """Return a step's outputs without gradients."""
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


Step = CompiledStep | OwnStep
"""A batch's step: as `compile` describes it, or by the model's own hooks."""


def entry_of(
    model: Module, wrapped: WrappedModel, method: str, *, moves: bool
) -> Callable[..., Any]:
    """How to call a step of a wrapped model: the step itself where nothing stands
    between.

    Args:
        moves: whether the data or the model move batches in their own way.
    """
    if moves:

        def enter(batch: Any, *arguments: Any) -> Any:
            return wrapped("_step_on_device", batch, method, *arguments)

        return enter
    if wrapped.is_bare:
        step: Callable[..., Any] = getattr(model, method)
        return step
    return partial(wrapped, method)
