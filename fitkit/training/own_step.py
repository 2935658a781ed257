"""A step by the hooks that a model defines, such as `training_step`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fitkit import trees
from fitkit.arguments import describe
from fitkit.data.batches import Batch
from fitkit.data.to_device import Mover, own_data
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.wrapped_model import ReplicatedModel, WrappedModel, mean_by
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import overridden, step_arguments
from fitkit.losses import checked_count
from fitkit.modes import weights_cast_anew
from fitkit.module import Module, is_metric
from fitkit.training.log import Logbook
from fitkit.training.step import CompiledStep, Outcome
from fitkit.training.step_context import StepContext

if TYPE_CHECKING:
    from fitkit.extras.sync_batchnorm import Synchronization


class OwnStep:
    """Computes batches by the hooks that the model defines.

    In training these are `training_step` and `training_step_end`, and `training_epoch_end` gets at
    the pass's end what they returned; `validation_` and `test_` have the same three, and `predict_`
    has the first two.

    Args:
        model: has the hooks.
        stage: which three they are.
        compiled: the step that `compile` describes, which the hooks may ask for.
        wrapped: calls the step, as the strategy wants it called.
        transfer: the data's own way to move a batch; None leaves that to the model.

    Attributes:
        may_count, may_be_nan: as in `CompiledStep`, whose loss the hooks may ask for.
        compiled: the step that `compile` describes.
        synchronization: what synchronised batch normalisations go by; None where there are none.
        ranks: those that see different data.
        keeps: whether the pass's `_epoch_end` wants what the steps returned.
    """

    def __init__(
        self,
        model: Module,
        stage: str,
        compiled: CompiledStep,
        wrapped: WrappedModel,
        transfer: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        strategy = model._fitkit.compilation.strategy
        self.model = model
        self.compiled = compiled
        self.wrapped = wrapped
        self.transfer = transfer
        self.mover: Mover = compiled.mover
        self._contexts = model._fitkit.contexts
        self.may_count: bool = True
        self.may_be_nan: bool = True
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
        self._stage = stage
        self._needs_loss = stage == "training" and model.automatic_optimization
        self.keeps: bool = self._has_loss and overridden(model, f"{stage}_epoch_end")

    def enter_again(self) -> None:
        """Call the model's step as the model is wrapped now."""
        self.enter: Callable[..., Any] = entry_of(
            self.model, self.wrapped, self.method, moves=not self.mover.is_ours
        )

    @property
    def context(self) -> StepContext:
        """The pass that this thread makes."""
        found: StepContext = self._contexts.current  # type: ignore[assignment]
        return found

    def call_epoch_end(self, record: Logbook) -> None:
        """Call the hook at a pass's end, `_epoch_end`."""
        self._warn_of_silence(record)
        if record.outputs is None:
            return
        context = self.context
        context.is_over = True
        try:
            getattr(self.model, f"{self._stage}_epoch_end")(record.outputs)
        finally:
            context.is_over = False

    def _warn_of_silence(self, record: Logbook) -> None:
        """Say what an epoch shows of things that went nowhere."""
        compiled = self.compiled
        if self._needs_loss and record.seen and record.loss.last is None:
            warn(
                "training_step returned None for every batch, so nothing was learned. Return the "
                "loss.",
                code="FK025",
            )
        if compiled.class_weights is not None and compiled.seen is None:
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
        context.is_part, context.inside, context.in_step = is_part, None, True
        if self.synchronization is not None:
            self.synchronization.counts = not is_padding
        leaves_no_trace = self._has_loss and (is_padding or context.is_silent)
        with _metrics_restored(self.model) if leaves_no_trace else contextlib.nullcontext():
            given = own_data(batch) if self._moves else self.mover(batch)
            with weights_cast_anew(), self.autocast():
                try:
                    outputs = self.enter(given, *self.arguments(index, optimizer_idx))
                except Exception as error:
                    from fitkit.extras.explain import raise_explained_of_own_step

                    raise_explained_of_own_step(error, self.model)
                    raise
                outputs = self.ended(outputs)
            found = Outcome(None, outputs=outputs)
            if self._has_loss:
                found = self._outcome(outputs, context.inside)
            context.inside, context.in_step = None, False
        return found

    def again(
        self, batch: Batch, index: int, optimizer_idx: int = 0, *, is_part: bool = False
    ) -> Outcome:
        """Return the batch's outcome once more (LBFGS computes it several times)."""
        context = self.context
        context.is_silent = True
        try:
            return self(batch, index, optimizer_idx, is_part=is_part)
        finally:
            context.is_silent = False

    def record(self, batch: Batch, outcome: Outcome, record: Logbook) -> None:
        """Take a batch's loss, and what its step returned, into a pass's values.

        Ranks:
            Collective in training, if the step logs values that the ranks exchange in each step.
        """
        record.samples = samples = batch.samples
        is_training = self._stage == "training"
        if samples == 0:
            record.padding += 1
        else:
            record.seen += samples
            if outcome.loss is not None:
                count = outcome.count
                record.loss.add(outcome.loss.detach(), samples if count is None else count)
            if record.outputs is not None:
                record.outputs.append(without_gradients(outcome.outputs, training=is_training))
        if is_training:  # elsewhere ranks may make unequal numbers of steps
            record.logged.exchange(self.ranks, is_padding=samples == 0)

    def looking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a pass's batches. What is in them is the own step's matter."""
        return batches

    def joining_losses(self, first: Batch) -> None:
        """Return None: the model's own code computes each loss."""

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

    def _outcome(self, outputs: Any, inside: Outcome | None) -> Outcome:
        found = loss_in(outputs)
        loss = None
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            loss = found.reshape(())
        elif self._stage != "training" and isinstance(found, float):
            loss = torch.tensor(found)
        if self._needs_loss and outputs is not None and (loss is None or not loss.requires_grad):
            self._check(loss, found, outputs)
        said = said_count(outputs)
        if said is not None:
            count = checked_count(said, f"{self.method} returned 'count'")
            return Outcome(loss, count, outputs=outputs)
        if inside is None or inside.loss is not found:
            return Outcome(loss, outputs=outputs)
        return Outcome(loss, inside.count, inside.terms, outputs)

    def counts_of(self, batch: Batch) -> list[float]:
        """As `CompiledStep.counts_of`, where the compiled loss is what the step returns."""
        return self.compiled.counts_of(batch)

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


def without_gradients(outputs: Any, *, training: bool) -> Any:
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
