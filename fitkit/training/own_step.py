"""One batch by the steps that a model defines itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from fitkit import trees
from fitkit.arguments import describe
from fitkit.data.batches import samples_of
from fitkit.data.sharding import RankBatch
from fitkit.data.to_device import Mover
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.rows import mean_by
from fitkit.distributed.sync_batchnorm import Synchronization
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import overridden, step_arguments
from fitkit.losses import Count, Term, checked_count
from fitkit.module import Module, is_metric
from fitkit.training.context import StepContext
from fitkit.training.log import Logbook
from fitkit.training.step import CompiledStep


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
        self.is_part: bool = False
        self.outputs: list[Any] | None = None
        self.synchronization: Synchronization | None = None
        self.ranks: Collectives = strategy.data_ranks
        self.autocast = partial(strategy.precision.autocast, strategy.device.type)
        self._method = f"{stage}_step"
        self._arguments = step_arguments(model, self._method)
        self.enter = entry_of(model, wrapped, self._method)
        self._end = getattr(model, f"{stage}_step_end")
        self._has_end = overridden(model, f"{stage}_step_end")
        # A transfer of the model's own is part of what is called through a wrapper: under dp each
        # replica brings its part to its own device.
        self._moves = overridden(model, "transfer_batch_to_device")
        self._needs_loss = stage == "training" and model.automatic_optimization
        self._is_first = True
        self.keeps: bool = overridden(model, f"{stage}_epoch_end")
        self.begin()

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
        self, batch: Any, index: int, optimizer_idx: int = 0, *, counts: bool = True
    ) -> torch.Tensor | None:
        """The batch's loss, if it has one, noted in the logbook.

        Args:
            counts: whether the batch counts; else it leaves no trace but its gradients.

        Raises:
            ConfigurationError: a training step gave no loss that can be learned from.
        """
        context = self.context
        rank_batch = batch if type(batch) is RankBatch else None
        batch = batch if rank_batch is None else rank_batch.batch
        self.samples = self.total = samples_of(batch)
        if rank_batch is not None:
            self.samples, self.total = rank_batch.count, rank_batch.total
        context.samples, is_padding = self.samples, rank_batch is not None and rank_batch.count == 0
        context.is_padding = is_padding or not counts
        if self.synchronization is not None:
            self.synchronization.counts = not is_padding
        if context.waiting and counts:
            context.take_waiting()  # before the ranks exchange the step's values
        with _metrics_kept(self.model) if context.is_padding else contextlib.nullcontext():
            moved = batch if self._moves else self.mover.transfer(batch)
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

    def take(
        self, batch: Any, count: Any, rank_batch: RankBatch | None, *, is_compiled_loss: bool
    ) -> None:
        """Take a batch whose step was computed elsewhere: it counts from now on.

        Args:
            count: what the step said that its loss is the mean over; None where it didn't.
            rank_batch: what the batch is among those of all ranks; None on one rank.
            is_compiled_loss: whether the step returned what `super().training_step` gave.
        """
        context = self.context
        self.samples = self.total = samples_of(batch)
        if rank_batch is not None:
            self.samples, self.total = rank_batch.count, rank_batch.total
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
            self.outputs.append(_kept(outputs, training=context.name == "training"))

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

    def again(self, batch: Any, index: int, optimizer_idx: int = 0) -> torch.Tensor:
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

    def counts_of(self, batch: Any) -> list[float]:
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
    """Computes batches' outputs by the model's `predict_step` and `predict_step_end`.

    Args:
        model, context, wrapped: as in `OwnStep`.
    """

    def __init__(self, model: Module, context: StepContext, wrapped: WrappedModel) -> None:
        assert context.predicting is not None
        strategy = model._fitkit.compilation.strategy
        self.context = context
        self.mover: Mover = context.predicting.mover
        self._autocast = partial(strategy.precision.autocast, strategy.device.type)
        self._takes_index = "batch_idx" in step_arguments(model, "predict_step")
        self._enter = entry_of(model, wrapped, "predict_step")
        self._end = model.predict_step_end
        self._moves = overridden(model, "transfer_batch_to_device")
        self._is_first = True

    def __call__(self, batch: Any, index: int = 0) -> Any:
        """The outputs for a batch."""
        arguments = (index,) if self._takes_index else ()
        self.context.samples = samples_of(batch)
        with self._autocast():
            moved = batch if self._moves else self.mover.transfer(batch)
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
