"""`fit`, on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fitkit.callbacks import CallbackList, History
from fitkit.callbacks.base import SHORT_NAMES, overrides
from fitkit.callbacks.display import chosen_verbose
from fitkit.data.stream import Stream
from fitkit.errors import ConfigurationError
from fitkit.notices import warn
from fitkit.training.fit_state import check_monitor
from fitkit.training.jobs import FitJob
from fitkit.training.loop import train_batches
from fitkit.training.passes import evaluate_source
from fitkit.training.rates import after_update, scale_rates, warm_up
from fitkit.training.reduction import reduced
from fitkit.training.runs import closing, compiled_step, share_of, updater_of, with_own
from fitkit.training.session import backend_flags, modes_restored, unchanged_on_error
from fitkit.training.steps import CompiledStep

if TYPE_CHECKING:
    from fitkit.model import Model
    from fitkit.training.compilation import Compilation

BATCH_HOOKS = (*SHORT_NAMES, *SHORT_NAMES.values())
"""Hooks in which a callback may stop an epoch."""


class FitRun:
    """One call of `fit` on this rank.

    Args:
        model: what learns.
        compilation: what `compile` decided.
        job: what `fit` was asked.
    """

    def __init__(self, model: Model, compilation: Compilation, job: FitJob) -> None:
        self.model = model
        self.compilation = compilation
        self.job = job
        self.strategy = compilation.strategy
        self.collectives = self.strategy.collectives
        self.strategy.place(model)
        self.source = share_of(job.source, compilation, training=True)
        self.held_out = (
            None if job.held_out is None else share_of(job.held_out, compilation, training=False)
        )
        self.stream = Stream(self.source, job.steps_per_epoch, first=job.initial_epoch)
        held_out_target = None if self.held_out is None else self.held_out.target
        self.step = compiled_step(
            model,
            compilation,
            self.strategy.door(model),
            job.weights_by_class,
            [self.source.target, held_out_target],
        )
        steps = self._updates_in_an_epoch()
        # The optimizer is made here, after the module has its place.
        optimizer = model.optimizer
        factor = scale_rates(
            model.fit_state, optimizer, compilation.scale_lr, self.collectives.world_size
        )
        self.scheduler = model.fit_state.scheduler_for(
            model,
            compilation,
            epochs=job.epochs,
            initial_epoch=job.initial_epoch,
            steps=steps,
        )
        begins = job.initial_epoch == 0
        self.warm_up = warm_up(
            optimizer, compilation.warmup_epochs if begins else None, steps, factor
        )
        self.updater = updater_of(
            model, compilation, after_update=after_update(self.warm_up, self._scheduler_step())
        )
        self.validation_step: CompiledStep | None = None
        self.history = History()

    def _updates_in_an_epoch(self) -> int | None:
        """How many updates an epoch makes, where that is known."""
        steps = self.stream.steps
        if steps is None:
            return None
        return -(-steps // self.compilation.accumulate_grad_batches)

    def _scheduler_step(self) -> Callable[[], Any] | None:
        """What moves a scheduler that counts updates."""
        choice = self.compilation.scheduler
        if choice is None or choice.interval != "step":
            return None
        return steps_to_the_end(self.scheduler)

    def run(self) -> History:
        """Train for the epochs that were asked; the history of them."""
        model, job = self.model, self.job
        callbacks = with_own(job.callback_list, job.verbose, self.history)
        model.begin_fit(self.history, self.source.batch_size)
        self._announce()
        callbacks.begin(model, self._params())
        try:
            with modes_restored(model), backend_flags(self.compilation), closing(callbacks):
                callbacks.call("on_train_begin", {})
                logs: dict[str, Any] = {}
                for epoch in range(job.initial_epoch, job.epochs):
                    logs = self._epoch(epoch, callbacks, logs)
                    if model.stop_training:
                        break
                callbacks.call("on_train_end", logs)
        finally:
            self.strategy.finish()
        return self.history

    def _announce(self) -> None:
        """Say once, where there are several ranks, how many samples make one update."""
        ranks, size = self.collectives.world_size, self.source.batch_size
        if ranks == 1 or self.collectives.rank or chosen_verbose(self.job.verbose) == 0:
            return
        kind = self.strategy.device.type
        batch = f", batches of {ranks} x {size} = {ranks * size} samples" if size else ""
        print(f"{ranks} processes on {kind}{batch}", flush=True)

    def _epoch(self, epoch: int, callbacks: CallbackList, last: dict[str, Any]) -> dict[str, Any]:
        """One epoch; its logs, or the last epoch's where the data have run out."""
        self.model.train()
        self.step.logbook.reset()
        callbacks.call("on_epoch_begin", epoch, {})
        batches = train_batches(
            self.stream.epoch(), self.step, self.updater, callbacks, self._stops_now()
        )
        if self._ran_out(epoch, batches):
            return last
        logs = reduced(self.step.logbook, self.collectives)
        self.model.remember_names(list(logs))
        if self.held_out is not None and self.job.validates_after(epoch):
            values = self._validate(callbacks)
            logs.update({f"val_{name}": value for name, value in values.items()})
        self._schedule(logs)
        callbacks.call("on_epoch_end", epoch, logs)
        if self.job.callback_list.callbacks:
            self.model.stop_training = self._any_stops()
        return logs

    def _any_stops(self) -> bool:
        """Whether some rank's callbacks ask to stop."""
        return any(self.collectives.gather(self.model.stop_training))

    def _stops_now(self) -> Callable[[], bool] | None:
        """What tells after a batch whether to stop.

        On several ranks that takes an exchange, made only where a callback of the user's acts
        at batches: nobody else stops an epoch.
        """
        if self.collectives.world_size == 1:
            return lambda: self.model.stop_training
        acts = any(
            overrides(callback, hook)
            for callback in self.job.callback_list.callbacks
            for hook in BATCH_HOOKS
        )
        return self._any_stops if acts else None

    def _ran_out(self, epoch: int, batches: int) -> bool:
        """Whether an epoch got no batches; fewer than asked end the training, with a warning."""
        asked = self.job.steps_per_epoch
        if batches >= (asked or 1) or (self.model.stop_training and batches > 0):
            return False
        if batches == 0 and epoch == self.job.initial_epoch:
            raise ConfigurationError("x is empty: it gave no batches.")
        wanted = f" of the {asked} that steps_per_epoch asks for" if asked else ""
        warn(f"x ended in epoch {epoch + 1} after {batches} batches{wanted}; training ends here.")
        self.model.stop_training = True
        return batches == 0

    def _validate(self, callbacks: CallbackList) -> dict[str, Any]:
        """The values of a pass over the validation data."""
        assert self.held_out is not None
        if self.validation_step is None:
            # Below the wrapper: a rank without batches would never join its exchanges.
            self.validation_step = compiled_step(
                self.model, self.compilation, self.model, name="validation_data"
            )
        return evaluate_source(
            self.model,
            self.compilation,
            self.held_out,
            self.job.validation_steps,
            self.validation_step,
            callbacks,
            name="validation_data",
        )

    def _schedule(self, logs: dict[str, Any]) -> None:
        """The scheduler's step at an epoch's end."""
        choice, scheduler = self.compilation.scheduler, self.scheduler
        if choice is None or choice.interval != "epoch":
            return
        if self.warm_up is not None and not self.warm_up.is_over:
            return
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            steps_to_the_end(scheduler)()
            return
        watched = choice.monitor or ("val_loss" if self.held_out is not None else "loss")
        validated = any(name.startswith("val_") for name in logs)
        if watched in logs:
            scheduler.step(logs[watched])
        elif validated or self.held_out is None or not watched.startswith("val_"):
            check_monitor(watched, logs)

    def _params(self) -> dict[str, Any]:
        job = self.job
        validation = self.held_out.steps if self.held_out is not None else None
        return {
            "stage": "fit",
            "epochs": job.epochs,
            "initial_epoch": job.initial_epoch,
            "steps": self.stream.steps,
            "samples": self.source.samples,
            "batch_size": self.source.batch_size,
            "validation_steps": job.validation_steps or validation,
            "verbose": job.verbose,
        }


def steps_to_the_end(scheduler: Any) -> Callable[[], Any]:
    """The scheduler's step; one with a fixed length (OneCycleLR) keeps its last rate after it."""
    total = getattr(scheduler, "total_steps", None)
    if total is None:
        return scheduler.step

    def step() -> None:
        if scheduler.last_epoch + 1 < total:
            scheduler.step()

    return step


def run_fit(model: Model, compilation: Compilation, job: FitJob) -> History:
    """`fit` on this rank."""
    with unchanged_on_error(model):
        return FitRun(model, compilation, job).run()
