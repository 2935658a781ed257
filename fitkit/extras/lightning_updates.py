"""The updates of a `LightningModule`: its hooks at each batch, in Lightning's order.

`HookedUpdates` stands in the place of what `fit` trains by, and calls that. The updates themselves
stay fitkit's: how gradients of batches and ranks are weighed, accumulated, scaled and exchanged.
"""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError, warn_once
from fitkit.extras.lightning_base import ServedModel, refusal
from fitkit.extras.lightning_objects import HandedOptimizer, toggled
from fitkit.seams.data import Batch
from fitkit.seams.optimizers import PlannedScheduler
from fitkit.seams.steps import (
    Applier,
    CarriedTally,
    Logbook,
    ScaledApplier,
    Update,
    Updates,
    loss_in,
)

AROUND_UPDATES = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad",
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step",
    "configure_gradient_clipping", "clip_gradients", "optimizer_step", "lr_scheduler_step",
)  # fmt: skip
"""Hooks that are called at the batches of a training."""


@dataclasses.dataclass
class HookedScheduler(PlannedScheduler):
    """A scheduler that moves when Lightning would move it. `Rates` leaves it alone.

    Attributes:
        every: `"epoch"`, or `"step"` for each batch with an update. `frequency` counts the batches
            of an epoch, or epochs.
    """

    every: str = "epoch"

    @classmethod
    def of(cls, plan: PlannedScheduler) -> HookedScheduler:
        """Return a plan that moves as Lightning would move it."""
        values = {one.name: getattr(plan, one.name) for one in dataclasses.fields(PlannedScheduler)}
        return cls(**{**values, "interval": "hooks"}, every=plan.interval)


class Idle(Optimizer):
    """Stands for no optimizer: it changes nothing.

    Args:
        parameters: the model's.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Only call the closure."""
        return None if closure is None else closure()


class OfAll(torch.autograd.Function):
    """Gives a loss, in which all parameters have a part that is zero.

    Ranks exchange gradients where all parameters have some. A module without an optimizer may
    compute a loss of none.
    """

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        context.parameters = parameters
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *map(torch.zeros_like, context.parameters)


class HookedUpdates:
    """Trains by batches as `fit` does, with the module's hooks around each.

    Args:
        model: the model.
        updates: what makes the updates.
        steps: the batches of an epoch; None if unknown.

    Attributes:
        batch_idx: the number of the current batch in the epoch.
        is_last: whether it is the epoch's last.
        waits_for_values: whether a validation comes before the schedulers that watch a value.
    """

    def __init__(self, model: ServedModel, updates: Updates, steps: int | None) -> None:
        self._model, self._hooks, self._steps = model, model.hooks, steps
        self._update: HookedUpdate | None = None
        if isinstance(updates, Update):
            updates = self._update = hooked(updates, model)
        self._updates = updates
        self.batch_idx: int = 0
        self.is_last: bool = False
        self.waits_for_values: bool = False
        self._ends = False  # a hook has ended the epoch
        ranks = model._fitkit.compilation.strategy.collectives
        begins = getattr(model.net, "on_train_batch_start", None)
        asks = ranks.world_size > 1 and self._hooks.has("on_train_batch_start")
        self._ranks = ranks if asks and may_return(begins) else None

    def peekable(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        batches = self._updates.peekable(batches)
        done = self._model.run.steps_done
        self._ends, self.is_last = False, 0 < done == self._steps
        self._go_on(done)
        return self._until_ended(batches if self._steps is not None else self._with_end(batches))

    def _until_ended(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            if self._ends:
                return

    def _with_end(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches, and know which is the last, by reading one ahead."""
        ahead = next(batches, None)
        if ahead is None:  # the last one came before an interruption
            self.is_last = True
            self._go_on(self._model.run.steps_done)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            self.is_last = ahead is None
            yield batch

    def _go_on(self, done: int) -> None:
        """Be as after the last batch before an interruption of the epoch.

        Args:
            done: the batches before it.
        """
        validated = self._model.run.data.place.validated
        is_validated = validated is not None and validated["steps"] == done
        self.batch_idx = max(done - 1, 0)
        self.waits_for_values = done > 0 and not is_validated and self._waits_after(done)

    def _waits_after(self, steps: int) -> bool:
        """Whether a validation comes before the schedulers, after so many batches of the epoch."""
        has_schedulers = bool(self._model._fitkit.fit_state.schedulers)
        return has_schedulers and self._model.validates_next(steps)

    def __call__(self, batch: Batch, index: int, record: Logbook) -> None:
        model, hooks = self._model, self._hooks
        self.after_validation()
        self.batch_idx = index
        if self._steps is not None:
            self.is_last = index + 1 == self._steps
        moved = hooks.begin_batch(model, batch) if hooks.moves else None
        self._ends = self._any_ends(hooks.ask("on_train_batch_start", moved, index) == -1)
        if not self._ends:
            self._updates(batch, index, record)
            if self.is_last and self._update is not None:
                self._update.finish()  # an update of fewer batches belongs to the last of them
        self.is_last = self.is_last or self._ends
        self.move_rates("step", watching=False)
        if self.is_last:
            self.move_rates("epoch", watching=False)  # before the validation, as Lightning's
        if not self._ends:
            if hooks.has("on_train_batch_end"):
                hooks.call("on_train_batch_end", self._outputs(), moved, index)
            self.waits_for_values = self._waits_after(index + 1)
            if not self.waits_for_values:
                self.move_rates("step", watching=True)
        hooks.forget_batch()

    def after_validation(self) -> None:
        """Move the schedulers of steps that watch a value, which the validation may have set."""
        if self.waits_for_values:
            self.waits_for_values = False
            self.move_rates("step", watching=True)

    def _any_ends(self, ends: bool) -> bool:
        """Whether the epoch ends before this batch, on any rank.

        Ranks:
            Collective, if the hook that says so may return something.
        """
        if self._ranks is None:
            return ends
        return self._ranks.sums([float(ends)])[0] > 0

    def _outputs(self) -> dict[str, Any]:
        """Return what the step returned, as `on_train_batch_end` gets it: a part of an update's
        loss, without gradients, and all else as it is.
        """
        outputs = self._hooks.outputs
        if outputs is None:
            return {}
        found = dict(outputs) if isinstance(outputs, Mapping) else {"loss": loss_in(outputs)}
        update = self._update
        if update is not None and update.loss is not None:
            found["loss"] = update.loss / update.accumulate
        if isinstance(found.get("loss"), torch.Tensor):
            found["loss"] = found["loss"].detach()
        return found

    # ------------------------------------------------------------------ learning rates

    def move_rates(
        self, every: str, *, watching: bool, values: Mapping[str, Any] | None = None
    ) -> None:
        """Move the schedulers whose interval has ended.

        Args:
            every: the interval.
            watching: whether those that watch a value move, or all others.
            values: those of the epoch.
        """
        model = self._model
        state = model._fitkit.fit_state
        if not state.schedulers or not model.automatic_optimization:
            return
        if every == "step" and not self._updates.is_between_updates:
            return
        past = 1 + (self.batch_idx if every == "step" else model.current_epoch)
        for plan in state.schedulers:
            if not isinstance(plan, HookedScheduler) or plan.every != every:
                continue
            if plan.watches == watching and past % plan.frequency == 0:
                self._move(plan, values)

    def _move(self, plan: HookedScheduler, values: Mapping[str, Any] | None) -> None:
        scheduler, metric = plan.scheduler, None
        if plan.watches:
            values = self._model.trainer.callback_metrics if values is None else values
            monitor = plan.monitor or ("val_loss" if "val_loss" in values else "loss")
            metric = values.get(monitor, values.get(f"{monitor}_epoch"))
            if plan.every == "step":
                metric = self._of_all_ranks(metric)
            if metric is None:
                problem = (
                    f"lr_scheduler monitors {monitor!r}, but the logs have {', '.join(values)}."
                )
                if plan.strict:
                    raise ConfigurationError(problem, code="FK030")
                warn_once(f"{problem} The scheduler waits until the logs have it.")
                return
        total = getattr(scheduler, "total_steps", None)
        if self._hooks.has("lr_scheduler_step"):
            seen = None if metric is None else torch.as_tensor(metric, dtype=torch.float32)
            self._hooks.call("lr_scheduler_step", scheduler, seen)
        elif metric is not None:
            scheduler.step(metric)
        elif total is None or scheduler.last_epoch + 1 < total:
            scheduler.step()

    def _of_all_ranks(self, value: Any) -> Any:
        """Return the mean of a step's value over the ranks, whose rates must stay the same.

        Ranks:
            Collective. A rank without a value has None.
        """
        ranks = self._model._fitkit.compilation.strategy.data_ranks
        if ranks.world_size == 1:
            return value
        total, count = ranks.sums([0.0, 0.0] if value is None else [float(value), 1.0])
        return torch.tensor(total / count) if count else None

    # ------------------------------------------------------------------ as Updates

    @property
    def is_between_updates(self) -> bool:
        return self._updates.is_between_updates

    def before_backward(self, loss: torch.Tensor | None) -> None:
        """Call the hooks between a step and its backward."""
        if self._update is not None:
            self._update.before_backward(loss, self.batch_idx)

    def flush(self) -> None:
        self._updates.flush()

    def finish(self) -> None:
        if self._update is None:
            self._updates.finish()
        else:  # of a group that a stop has cut
            self._update.finish_by_hook(self.batch_idx)


def may_return(function: Any) -> bool:
    """Whether a function may return something else than None, by its code; True if unknown."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return True
    before = None
    for one in dis.get_instructions(code):
        if one.opname == "RETURN_CONST" and one.argval is not None:
            return True
        if one.opname == "RETURN_VALUE":
            is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            if one.is_jump_target or not is_none:
                return True
        before = one
    return False


def hooked(eager: Update, model: ServedModel) -> HookedUpdate:
    """Return updates that are made as before, with the module's hooks in them."""
    kind: type[HookedUpdate] = type("HookedUpdate", (HookedUpdate, type(eager)), {})
    return kind(eager, model)


class HookedUpdate(Update):
    """Makes one optimizer's updates, with the module's hooks in them.

    Args:
        eager: whose place it takes, with all that belongs to it.
        model: the model.
    """

    def __init__(self, eager: Update, model: ServedModel) -> None:
        vars(self).update(vars(eager))
        self._model, self._hooks = model, model.hooks
        self.apply: Any = HookedApplier(eager.apply, model)
        self._has_begun = False  # the batch, whatever parts it is computed in
        self.loss: torch.Tensor | None = None  # of the last batch
        if type(eager) is not Update and self._hooks.has("optimizer_zero_grad"):
            raise refusal(
                f"{self._hooks.kind.__name__} overrides optimizer_zero_grad, which decides what "
                "gradients a batch adds to, but out_of_memory='split' may compute a batch's "
                "gradients several times. Leave one of them out.",
            )
        if self._hooks.has("backward"):
            if self._strategy.engine is not None:
                raise refusal(
                    f"{self._hooks.kind.__name__} overrides backward, but strategy="
                    f"{self._strategy.name!r} computes gradients itself. Use 'ddp'.",
                )
            self.backward = partial(self._hooks.call, "backward")
            if self._tally.is_carried and not self._exchanges:
                (carrier,) = self._tally.parameters
                self._tally = HookedTally(self._strategy.data_ranks, carrier, by_hand=False)

    def begin(self) -> None:
        if self._batches or not self._hooks.has("optimizer_zero_grad"):
            super().begin()
            return
        before = [parameter.grad for parameter in self.parameters]
        super().begin()
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient  # the hook decides

    def before_backward(self, loss: torch.Tensor | None, index: int) -> None:
        """Call the hooks between a step and its backward."""
        hooks = self._hooks
        if self._batches == 0 and not self._has_begun:
            self._has_begun = True
            hooks.ask("on_before_zero_grad", self.optimizer)
            hooks.ask("optimizer_zero_grad", self._model.current_epoch, index, self.optimizer)
        if loss is not None:
            if self._again is not None:  # its optimizer may compute the batch several times
                self.loss = loss.detach()
            if hooks.has("on_before_backward"):
                parts = self.accumulate
                hooks.call("on_before_backward", loss if parts == 1 else loss / parts)
            self.apply.is_after_backward = True

    def __call__(self, batch: Batch, index: int, record: Logbook, **options: Any) -> Any:
        completes = self._batches + 1 == self.accumulate or self._model.is_last_batch
        if not (completes and self._hooks.has("optimizer_step")):
            return self._learned(batch, index, record, **options)
        batch.is_lent = True  # the hook may compute it several times
        self._by_hook(index, lambda: self._learned(batch, index, record, **options).loss)
        return None

    def _by_hook(self, index: int, learn: Callable[[], torch.Tensor | None]) -> None:
        """Make an update as `optimizer_step` makes it.

        Args:
            index: the number of the update's last batch in the epoch.
            learn: computes that batch; returns its loss.
        """
        step = OptimizerStep(self, learn)
        own, before = vars(self._model), self._fit_state.updates
        own["updates_before"] = before
        try:
            self._hooks.call(
                "optimizer_step", self._model.current_epoch, index, step.optimizer, step.closure
            )
        finally:
            own["updates_before"] = None
        if not step.is_computed:
            raise refusal(
                f"{self._hooks.kind.__name__}.optimizer_step hasn't called its closure, which "
                "computes the batch. Call optimizer.step(closure=optimizer_closure), or "
                "optimizer_closure() to leave out the update."
            )
        self._fit_state.updates = before + 1  # as Lightning counts, whatever the hook has done

    def finish_by_hook(self, index: int) -> None:
        """As `finish`, by `optimizer_step` if the module has it."""
        if self._batches == 0 or not self._hooks.has("optimizer_step"):
            self.finish()
            return

        def learn() -> torch.Tensor | None:
            self.finish()
            return self.loss

        self._by_hook(index, learn)

    def _compute_again(self, noted: Any) -> None:
        self._has_begun = False
        super()._compute_again(noted)

    def _learned(self, batch: Batch, index: int, record: Logbook, **options: Any) -> Any:
        self._has_begun = False
        outcome = super().__call__(batch, index, record, **options)
        if self._again is None:
            self.loss = None if outcome.loss is None else outcome.loss.detach()
        self.apply.after_backward()
        return outcome


class HookedTally(CarriedTally):
    """Carries counts past a `backward` of the module's own, which may scale the loss."""

    def joined(self, loss: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
        (carrier,) = self.parameters
        counts = torch.as_tensor(count, dtype=carrier.dtype, device=carrier.device)
        joined: torch.Tensor = _Counted.apply(loss, carrier, counts)
        return joined


class _Counted(torch.autograd.Function):
    """Gives a loss, whose backward also gives the carrier its count, however the hook scales it."""

    @staticmethod
    def forward(
        context: Any, loss: torch.Tensor, carrier: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        context.counts = counts
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, context.counts, None


class HookedApplier:
    """Makes updates as an `Applier` does, with the module's hooks before them.

    Args:
        applier: makes the updates.
        model: the model.

    Attributes:
        is_after_backward: whether the hook after a backward is due.
        waits: whether a hook of the module's decides when the update is made.
        is_ready: whether gradients wait for that.
    """

    def __init__(self, applier: Applier, model: ServedModel) -> None:
        self._applier, self._hooks = applier, model.hooks
        given = model._fitkit.compilation.given
        self._clips = self._hooks.has("configure_gradient_clipping", "clip_gradients")
        value = given.gradient_clip_val
        self._clipping = value, None if value is None else given.gradient_clip_algorithm
        if self._clips:
            applier._clip_value = None  # the hook clips
        self.is_after_backward: bool = False
        self.waits: bool = False
        self.is_ready: bool = False

    def after_backward(self) -> None:
        """Call the hook after a backward, unless that is done."""
        if self.is_after_backward:
            self.is_after_backward = False
            self._hooks.ask("on_after_backward")

    def __call__(self) -> None:
        self.after_backward()
        if self.waits:
            self.is_ready = True
            return
        self.make()

    def make(self) -> None:
        """Call the hooks before an update, and make it."""
        self.is_ready = False
        applier, optimizer = self._applier, self._applier.optimizer
        looks = self._clips or self._hooks.has("on_before_optimizer_step")
        if looks and isinstance(applier, ScaledApplier):
            applier.scaling.unscale(optimizer)
        self._hook_before_step()
        applier()

    def _hook_before_step(self) -> None:
        optimizer = self._applier.optimizer
        self._hooks.ask("on_before_optimizer_step", optimizer)
        if self._clips:
            value, algorithm = self._clipping
            module: Any = self._hooks.module
            self._hooks.run(
                "configure_gradient_clipping",
                module.configure_gradient_clipping,
                optimizer,
                gradient_clip_val=value,
                gradient_clip_algorithm=algorithm,
            )

    def clip(self) -> None:
        """Clip the gradients, in the closure of an optimizer that computes them itself."""
        self.after_backward()
        self._hook_before_step()
        self._applier.clip()

    def with_closure(self, closure: Callable[[], torch.Tensor]) -> None:
        """Make an update by an optimizer that computes gradients itself, any number of times."""
        self._applier.with_closure(closure)

    def count(self) -> None:
        """Count an update."""
        self._applier.count()


class OptimizerStep:
    """A batch's update as the hook `optimizer_step` may make it.

    Args:
        update: makes it.
        learn: computes the batch's gradients; returns its loss.

    Attributes:
        optimizer: whose `step` makes the update.
        is_computed: whether the closure was called.
    """

    def __init__(self, update: HookedUpdate, learn: Callable[[], torch.Tensor | None]) -> None:
        self._update, self._learn = update, learn
        self.is_computed: bool = False
        self.optimizer: Any = HandedOptimizer(update.optimizer, toggled(update._model), self.step)

    def closure(self) -> torch.Tensor | None:
        """Compute the batch's loss and gradients."""
        applier = self._update.apply
        applier.waits = self.is_computed = True
        try:
            loss = self._learn()
            if self._update._model.is_last_batch:
                self._update.finish()
        finally:
            applier.waits = False
        return None if loss is None else loss.detach()

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Make the update, after the closure if one is given."""
        found = None if closure is None else closure()
        if self._update.apply.is_ready:
            self._update.apply.make()
        return found
