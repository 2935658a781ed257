"""One batch by the steps of a model's own, and what its hooks need to know meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fitkit import trees
from fitkit.arguments import describe
from fitkit.data.batches import samples_of
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sharding import Share
from fitkit.data.sources import Source, drawn_from
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.rows import mean_by
from fitkit.distributed.strategies import Door
from fitkit.distributed.sync_batchnorm import Synchronization
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import has_own_steps, overridden, step_arguments
from fitkit.logging_options import LogOptions, is_metric
from fitkit.losses import Count, Term, checked_count
from fitkit.module import Module
from fitkit.training.log import Logbook, Logged
from fitkit.training.step import CompiledStep, Mover, PredictStep, caller_of, moved_by, mover_of

if TYPE_CHECKING:
    from fitkit.training.settings import Compilation


@dataclasses.dataclass
class StepContext:
    """One pass over data: an epoch's training, a validation, `evaluate`, `predict`.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        logged: what `self.log` was given.
        compiled: what `compile` described, for the hooks that call `super()`.
        transferred: brings a batch to the device as fitkit itself does.
        samples: of the current batch, on this rank.
        seen: samples of the pass so far, on this rank.
        is_over: whether the hook at the pass's end runs.
        is_filler: whether the current batch only fills a place and counts for nothing.
        is_opening: whether hooks run before a batch whose samples aren't known yet.
        waiting: what they have logged, until `take_waiting`.
        backward: computes a loss's gradients and averages them over the ranks; training only.
    """

    name: str
    logged: Logged = dataclasses.field(default_factory=Logged)
    compiled: CompiledStep | None = None
    predicting: PredictStep | None = None
    transferred: Callable[[Any], Any] = lambda batch: batch
    samples: int = 0
    seen: int = 0
    is_over: bool = False
    is_filler: bool = False
    is_opening: bool = False
    waiting: list[tuple[str, Any, LogOptions, int | None]] = dataclasses.field(default_factory=list)
    backward: Callable[..., None] | None = None

    @staticmethod
    def moved(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """A batch moved by a model's own hook."""
        return moved_by(own, batch, device)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The compiled loss of a batch that is on the device; compiled metrics count it."""
        assert self.compiled is not None
        return self.compiled.inside(model, batch, counts=not self.is_filler)

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """The net's outputs for a batch that is on the device."""
        assert self.predicting is not None
        return self.predicting.inside(model, batch)

    def open(self, hooks: Iterable[Callable[..., Any]], *arguments: Any) -> None:
        """Call hooks before a batch: what they log counts with that batch's samples."""
        self.is_opening = True
        for hook in hooks:
            hook(*arguments)
        self.is_opening = False

    def log(self, name: str, value: Any, options: LogOptions, samples: int | None) -> None:
        """Take a value that a hook logs, unless its batch counts for nothing.

        Raises:
            ConfigurationError: in `predict`; and what `Logged.add` refuses.
        """
        if self.name == "predict":
            raise ConfigurationError(
                f"self.log({name!r}) was called in predict, which has no logs. Return the value "
                "from predict_step, or log it in evaluate's test_step."
            )
        if self.is_opening:
            self.waiting.append((name, value, options, samples))
            return
        own_steps = self.samples or self.seen
        batch = self.samples if own_steps or self.compiled is None else self.compiled.samples
        if self.is_filler or (batch == 0 and not self.is_over):
            return
        if samples is None:
            # What is logged at a pass's end stands for all samples of this rank.
            samples = max(self.seen, 1) if self.is_over else batch
        self.logged.add(name, value, options, samples)

    def take_waiting(self) -> None:
        """Take what was logged before the current batch, now that its samples are known."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self.log(*entry)


class StepContexts:
    """The stages that run on a model: one a thread. A copy of a model gets none of them.

    Attributes:
        by_thread: the stages, by their threads' numbers.
        placing: held while the model is brought to its device, which one thread does at a time.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, StepContext] = {}
        self.placing = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepContexts, ()

    @property
    def current(self) -> StepContext | None:
        """This thread's stage; in a thread that only helps (a replica's, or autograd's) that of
        the thread that it helps, where one alone can be meant."""
        found = self.by_thread.get(threading.get_ident())
        if found is None and len(stages := list(self.by_thread.values())) == 1:
            return stages[0]
        return found


@contextlib.contextmanager
def running(model: Module, stage: StepContext) -> Iterator[StepContext]:
    """Make a stage the model's current one in this thread; calls of verbs may nest."""
    stages, thread = model._fitkit.contexts.by_thread, threading.get_ident()
    before = stages.get(thread)
    stages[thread] = stage
    try:
        yield stage
    finally:
        if before is None:
            del stages[thread]
        else:
            stages[thread] = before


class OwnStep:
    """Calls a stage's step and its `_step_end`, and keeps the pass's running values.

    Args:
        model: whose hooks they are.
        stage: what the hooks need to know.
        door: the way into them.
        mover: brings a batch to the device.
        logbook: where losses and logged values are noted.
        collectives: what the ranks exchange logged values by.
        around: surrounds each step (the precision's autocast).
        optional_loss: whether a training step may return anything (manual optimization).

    Attributes:
        samples: of the last batch on this rank; 0 where it only filled a place.
        total: of the last batches on all ranks.
        count, terms, may_count, is_part: as in `CompiledStep`.
        synchronization: what synchronised batch normalisations are told; None where there are none.
        outputs: what the steps returned; None where nobody wants it.
    """

    def __init__(
        self,
        model: Any,
        stage: StepContext,
        door: Door,
        mover: Mover,
        logbook: Logbook,
        collectives: Collectives,
        around: Any = contextlib.nullcontext,
        *,
        optional_loss: bool = False,
    ) -> None:
        self.model = model
        self.stage = stage
        self.door = door
        self.mover = mover
        self.logbook = logbook
        self.samples = 0
        self.total = 0
        self.count: Count = None
        self.terms: list[Term] | None = None
        self.may_count, self.is_part = True, False
        self.outputs: list[Any] | None = None
        self._collectives = collectives
        self._around = around
        self._method = f"{stage.name}_step"
        self._arguments = step_arguments(model, self._method)
        self._end = getattr(model, f"{stage.name}_step_end")
        self._has_end = overridden(model, f"{stage.name}_step_end")
        self._moves = overridden(model, "transfer_batch_to_device")
        self._needs_loss = stage.name == "training" and not optional_loss
        self.synchronization: Synchronization | None = None
        self._is_first = True
        self._keeps = overridden(model, f"{stage.name}_epoch_end")
        self.begin()

    def begin(self) -> None:
        """Begin a new pass."""
        self.logbook.reset()
        self.stage.seen = 0
        self.outputs = [] if self._keeps else None

    def finish(self) -> None:
        """Call the pass's `_epoch_end`."""
        self._warn_of_silence()
        if self.outputs is None:
            return
        outputs, self.outputs = self.outputs, []
        stage = self.stage
        stage.is_filler, stage.is_over = False, True
        try:
            getattr(self.model, f"{stage.name}_epoch_end")(outputs)
        finally:
            stage.is_over = False

    def _warn_of_silence(self) -> None:
        """Say what an epoch shows of things that went nowhere."""
        compiled = self.stage.compiled
        if self._needs_loss and self.stage.seen and self.logbook.loss.last is None:
            warn(
                "training_step returned None for every batch, so nothing was learned. Return the "
                "loss."
            )
        if compiled is not None and compiled.class_weights is not None and not compiled.checked:
            warn(
                "class_weight was given, but training_step computes the loss by itself: the "
                "weights count only in super().training_step."
            )

    def __call__(self, batch: Any, index: int, optimizer_idx: int = 0) -> torch.Tensor | None:
        """The batch's loss, if it has one, noted in the logbook.

        Raises:
            ConfigurationError: a training step gave no loss that can be learned from.
        """
        stage = self.stage
        share = batch if type(batch) is Share else None
        batch = batch if share is None else share.batch
        self.samples = self.total = samples_of(batch)
        if share is not None:
            self.samples, self.total = share.count, share.total
        stage.samples, stage.is_filler = self.samples, share is not None and share.count == 0
        if self.synchronization is not None:
            self.synchronization.counts = not stage.is_filler
        if stage.waiting:
            stage.take_waiting()  # before the ranks exchange the step's values
        keeping = _metrics_kept(self.model) if stage.is_filler else contextlib.nullcontext()
        with keeping:
            outputs = self._run(batch, index, optimizer_idx)
            loss = self._loss(outputs)
        if stage.is_filler:
            self.count = None if self.count is None else 0
            self.logbook.fillers += 1
        else:
            stage.seen += self.samples
            if loss is not None:
                weight = self.samples if self.count is None else self.count
                self.logbook.loss.add(loss.detach(), weight)
            if self.outputs is not None:
                self.outputs.append(_kept(outputs, training=stage.name == "training"))
        if stage.name == "training":  # elsewhere ranks may make unequal numbers of steps
            stage.logged.exchange(self._collectives, is_filler=stage.is_filler)
        return loss

    def again(self, batch: Any, index: int, optimizer_idx: int = 0) -> torch.Tensor:
        """The batch's loss once more, noted nowhere (LBFGS computes it several times)."""
        stage, is_filler = self.stage, self.stage.is_filler
        stage.is_filler = True
        try:
            with _metrics_kept(self.model):
                batch = batch.batch if type(batch) is Share else batch
                loss = self._loss(self._run(batch, index, optimizer_idx))
        finally:
            stage.is_filler = is_filler
        assert loss is not None
        return loss

    def after_first(self) -> None:
        """Undo what the first batch's step did to the data's memory."""
        self.mover.transfer.put_back()

    def _run(self, batch: Any, index: int, optimizer_idx: int) -> Any:
        values = {"batch_idx": index, "optimizer_idx": optimizer_idx}
        arguments = [values[name] for name in self._arguments]
        door = self.door
        with self._around():
            if self._moves:
                outputs = door("_step_on_device", batch, self._method, *arguments)
            else:
                outputs = door(self._method, self.mover.transfer(batch), *arguments)
            if self._has_end:
                outputs = self._end(outputs)
            elif door.weights is not None:
                outputs = with_mean_loss(outputs, door.weights)
        if self._is_first:
            self.mover.transfer.settle()
        return outputs

    def _loss(self, outputs: Any) -> torch.Tensor | None:
        found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        found = getattr(found, "loss", found)  # an object with .loss, as Hugging Face's
        loss = None
        self.count = self._count(outputs, found)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            loss = found.reshape(())
        elif self.stage.name != "training" and isinstance(found, float):
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
        compiled = self.stage.compiled
        if compiled is None or loss is None or compiled.inside_loss is not loss:
            return None
        self.terms = compiled.terms
        return compiled.count

    def counts_of(self, batch: Any) -> list[float]:
        """As `CompiledStep.counts_of`, where the compiled loss is what the step returns."""
        assert self.stage.compiled is not None
        return self.stage.compiled.counts_of(batch)

    def _check(self, loss: torch.Tensor | None, found: Any, outputs: Any) -> None:
        """Refuse what can't be learned from."""
        hooks = "training_step_end" if self._has_end else "training_step"
        if loss is None:
            what = "a dict without 'loss'" if isinstance(outputs, Mapping) else describe(found)
            if isinstance(found, torch.Tensor):
                what = f"a tensor of shape {tuple(found.shape)}"
            raise ConfigurationError(
                f"{hooks} returned {what}. Return the loss, a tensor with one number (its "
                ".mean(), say), or a dict that has it as 'loss'."
            )
        if not loss.requires_grad:
            raise ConfigurationError(
                f"The loss that {hooks} returned has no gradient, so nothing can learn from it. "
                "Compute it from the net's output, without .item(), .detach() or no_grad."
            )


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


def _kept(outputs: Any, *, training: bool) -> Any:
    """A step's outputs without gradients."""
    if training and isinstance(outputs, torch.Tensor):
        return outputs.detach().as_subclass(_Loss)
    return trees.map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs
    )


@contextlib.contextmanager
def _metrics_kept(model: torch.nn.Module) -> Iterator[None]:
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
    """Calls `predict_step` and `predict_step_end`.

    Args:
        model, stage, door, mover, around: as in `OwnStep`.
    """

    def __init__(
        self,
        model: Any,
        stage: StepContext,
        door: Door,
        mover: Mover,
        around: Any = contextlib.nullcontext,
    ) -> None:
        self.stage = stage
        self._door = door
        self.mover = mover
        self._transfer = mover.transfer
        self._around = around
        self._takes_index = "batch_idx" in step_arguments(model, "predict_step")
        self._end = model.predict_step_end
        self._moves = overridden(model, "transfer_batch_to_device")
        self._is_first = True

    def __call__(self, batch: Any, index: int = 0) -> Any:
        """The outputs for a batch."""
        arguments = (index,) if self._takes_index else ()
        self.stage.samples = samples_of(batch)
        with self._around():
            if self._moves:
                outputs = self._door("_step_on_device", batch, "predict_step", *arguments)
            else:
                outputs = self._door("predict_step", self._transfer(batch), *arguments)
            outputs = self._end(outputs)
        if self._is_first:
            self._transfer.settle()
            self._transfer.put_back()
            self._is_first = False
        return outputs


Step = CompiledStep | OwnStep
"""A batch's step: as `compile` describes it, or by the model's own hooks."""


def compiled_step(
    model: Module,
    compilation: Compilation,
    door: Door,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    ranks: Collectives | None = None,
    *,
    may_count: bool = True,
) -> CompiledStep:
    """A step with its own logbook and meters, so that calls can nest."""
    strategy = compilation.strategy
    compilation.loss.to(strategy.device)
    return CompiledStep(
        door,
        caller_of(model),
        mover_of(model, strategy),
        strategy.precision,
        compilation.loss.begin(),
        Logbook(compilation.metrics.meters()),
        class_weights,
        all_targets,
        name,
        ranks,
        may_count=may_count,
    )


def step_for(
    model: Module,
    compilation: Compilation,
    stage: str,
    *,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    source: Source | None = None,
) -> tuple[StepContext, Step]:
    """The step of a stage: `compile`'s, or the model's own where it has hooks for the stage."""
    strategy = compilation.strategy
    known = None if source is None else [drawn_from(source)]
    may_count = compilation.loss.may_count(known)
    if stage != "training":
        door = strategy.evaluation_door(model)
    elif learns_alone(model):
        strategy.may_count = may_count or has_own_steps(model, stage)
        door = strategy.door(model)
    else:
        door = strategy.plain_door(model)
    ranks = strategy.shares if stage == "training" else None
    compiled = compiled_step(
        model, compilation, door, class_weights, all_targets, name, ranks, may_count=may_count
    )
    running = StepContext(stage, compiled.logbook.logged, compiled)
    running.transferred = compiled.mover.transfer
    by_turns = stage == "training" and not learns_alone(model)
    moves_parts = strategy.replicates and overridden(model, "transfer_batch_to_device")
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return running, compiled
    own = OwnStep(
        model,
        running,
        door,
        compiled.mover,
        compiled.logbook,
        strategy.shares,
        partial(strategy.precision.forward, strategy.device.type),
        optional_loss=not model.automatic_optimization,
    )
    return running, own


def learns_alone(model: Module) -> bool:
    """Whether one optimizer makes one update a step, as wrappers like DDP's want it."""
    return model.automatic_optimization and len(model._fitkit.fit_state.optimizers) <= 1


def predict_step_for(model: Module, compilation: Compilation) -> tuple[StepContext, Any]:
    """The step of `predict`."""
    strategy = compilation.strategy
    door, mover = strategy.evaluation_door(model), mover_of(model, strategy)
    compiled = PredictStep(door, caller_of(model), mover, strategy.precision)
    stage = StepContext("predict", predicting=compiled, transferred=mover.transfer)
    if has_own_steps(model, "predict"):
        around = partial(strategy.precision.forward, strategy.device.type)
        return stage, OwnPredictStep(model, stage, door, mover, around)
    return stage, compiled
