"""What each rank runs for a call of fit, evaluate or predict."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from fitkit import trees
from fitkit.callbacks import Callback, CallbackList, History, ProgressBar
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sources import Source
from fitkit.data.stream import Stream, limited
from fitkit.errors import ConfigurationError
from fitkit.notices import warn
from fitkit.training.jobs import FitJob, PassJob
from fitkit.training.logbook import Logbook
from fitkit.training.loop import evaluate_batches, predict_batches, train_batches
from fitkit.training.session import (
    backend_flags,
    caller_of,
    copies_of_buffers,
    modes_restored,
    put_back,
    transfer_of,
)
from fitkit.training.steps import CompiledStep, PredictStep
from fitkit.training.updates import Updater

if TYPE_CHECKING:
    from fitkit.model import Model
    from fitkit.training.compilation import Compilation


def compiled_step(
    model: Model,
    compilation: Compilation,
    class_weights: ClassWeights | None = None,
    all_targets: Any = None,
) -> CompiledStep:
    """A step with its own logbook and meters, so that calls can nest."""
    strategy = compilation.strategy
    compilation.loss.to(strategy.device)
    return CompiledStep(
        strategy.door(model),
        caller_of(model),
        transfer_of(model, strategy),
        compilation.loss,
        Logbook(compilation.metrics.meters()),
        class_weights,
        all_targets,
    )


def updater_of(
    model: Model,
    compilation: Compilation,
    *,
    accumulate: int | None = None,
    after_update: Any = None,
) -> Updater:
    """What turns the model's losses into updates."""
    return Updater(
        compilation.strategy,
        model.optimizer,
        list(model.parameters()),
        accumulate=compilation.accumulate_grad_batches if accumulate is None else accumulate,
        clip_value=compilation.gradient_clip_val,
        clip_algorithm=compilation.gradient_clip_algorithm,
        after_update=after_update,
    )


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
        strategy = compilation.strategy
        source, held_out = job.sources(strategy.precision.input_dtype(model))
        strategy.place(model)
        model.optimizer  # noqa: B018  made here, so that bad arguments are told before any work
        self.source, self.held_out = source, held_out
        self.stream = Stream(source, job.steps_per_epoch, first=job.initial_epoch)
        self.step = compiled_step(model, compilation, job.weights_by_class, source.target)
        self.scheduler = model.scheduler_for(job.epochs, self._updates())
        self.updater = updater_of(model, compilation, after_update=self._scheduler_step("step"))
        self.validation_step: CompiledStep | None = None
        self.history = History()

    def _updates(self) -> int | None:
        """How many updates the whole training makes, where that is known."""
        steps = self.stream.steps
        if steps is None:
            return None
        groups = -(-steps // self.compilation.accumulate_grad_batches)
        return groups * self.job.epochs

    def _scheduler_step(self, interval: str) -> Any:
        choice = self.compilation.scheduler
        if choice is None or choice.interval != interval:
            return None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if interval == "step":
                raise ConfigurationError(
                    "ReduceLROnPlateau watches a value of an epoch; give it interval='epoch'."
                )
            return None
        return steps_to_the_end(self.scheduler)

    def run(self) -> History:
        """Train for the epochs that were asked; the history of them."""
        model, job = self.model, self.job
        callbacks = with_own(job.callback_list, job.verbose, self.history)
        buffers = copies_of_buffers(model)
        model.history = self.history
        model.stop_training = False
        model._batch_size = self.source.batch_size
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
        except BaseException:
            if self.updater.updates == 0:
                put_back(buffers)
            raise
        finally:
            for parameter in model.parameters():
                parameter.grad = None
        return self.history

    def _epoch(self, epoch: int, callbacks: CallbackList, last: dict[str, Any]) -> dict[str, Any]:
        """One epoch; its logs, or the last epoch's where the data have run out."""
        model = self.model
        model.train()
        self.step.logbook.reset()
        callbacks.call("on_epoch_begin", epoch, {})
        batches = train_batches(model, self.stream.epoch(), self.step, self.updater, callbacks)
        if self._ran_out(epoch, batches):
            return last
        logs = self.step.logbook.results()
        model._log_names = list(logs)
        if self.held_out is not None and self.job.validates_after(epoch):
            values = self._validate(callbacks)
            logs.update({f"val_{name}": value for name, value in values.items()})
        self._schedule(logs)
        callbacks.call("on_epoch_end", epoch, logs)
        return logs

    def _ran_out(self, epoch: int, batches: int) -> bool:
        """Whether an epoch got no batches; fewer than asked get a warning."""
        asked = self.job.steps_per_epoch or 1
        if batches >= asked or (self.model.stop_training and batches > 0):
            return False
        if batches == 0 and epoch == self.job.initial_epoch:
            raise ConfigurationError("x is empty: it gave no batches.")
        warn(
            f"x ended in epoch {epoch + 1} after {batches} batches of the {asked} that "
            f"steps_per_epoch asks for; training ends here."
        )
        self.model.stop_training = True
        return batches == 0

    def _validate(self, callbacks: CallbackList) -> dict[str, Any]:
        """The values of a pass over the validation data."""
        assert self.held_out is not None
        if self.validation_step is None:
            self.validation_step = compiled_step(
                self.model, self.compilation, all_targets=self.held_out.target
            )
        return evaluate_source(
            self.model,
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
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            steps_to_the_end(scheduler)()
            return
        watched = choice.monitor or ("val_loss" if self.held_out is not None else "loss")
        if watched in logs:
            scheduler.step(logs[watched])
        elif choice.monitor is not None and not watched.startswith("val_"):
            raise ConfigurationError(
                f"lr_scheduler monitors {watched!r}, but the logs have {', '.join(logs)}."
            )

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


def steps_to_the_end(scheduler: Any) -> Any:
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
    return FitRun(model, compilation, job).run()


def run_evaluate(model: Model, compilation: Compilation, job: PassJob) -> dict[str, Any]:
    """`evaluate` on this rank: the loss and metrics by name."""
    strategy = compilation.strategy
    source = job.source(strategy.precision.input_dtype(model))
    strategy.place(model)
    step = compiled_step(model, compilation, all_targets=source.target)
    callbacks = with_own(job.callback_list, job.verbose)
    callbacks.begin(model, _pass_params("evaluate", source, job))
    with backend_flags(compilation), closing(callbacks):
        return evaluate_source(model, source, job.steps, step, callbacks)


def evaluate_source(
    model: Model,
    source: Source,
    steps: int | None,
    step: CompiledStep,
    callbacks: CallbackList,
    name: str = "x",
) -> dict[str, Any]:
    """The values of one pass over a source, with the test hooks called.

    Raises:
        ConfigurationError: there was no batch.
    """
    step.logbook.reset()
    with modes_restored(model):
        model.eval()
        callbacks.call("on_test_begin", {})
        batches = evaluate_batches(limited(source, steps), step, callbacks)
        if batches == 0:
            raise ConfigurationError(f"{name} is empty: it gave no batches.")
        values = step.logbook.results()
        model._log_names = list(values)
        callbacks.call("on_test_end", values)
    return values


def run_predict(model: Model, compilation: Compilation, job: PassJob) -> Any:
    """`predict` on this rank: the outputs of all batches, joined."""
    strategy = compilation.strategy
    source = job.source(strategy.precision.input_dtype(model))
    strategy.place(model)
    step = PredictStep(strategy.door(model), caller_of(model), transfer_of(model, strategy))
    callbacks = with_own(job.callback_list, job.verbose)
    callbacks.begin(model, _pass_params("predict", source, job))
    with modes_restored(model), backend_flags(compilation), closing(callbacks):
        model.eval()
        callbacks.call("on_predict_begin", {})
        outputs = predict_batches(limited(source, job.steps), step, callbacks)
        callbacks.call("on_predict_end", {})
    if not outputs:
        raise ConfigurationError("x is empty: it gave no batches.")
    return joined(outputs)


def joined(outputs: list[Any]) -> Any:
    """Batches' outputs as one.

    Raises:
        ConfigurationError: their shapes differ beyond the first dimension.
    """
    try:
        return trees.concatenate(outputs)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            "The batches' outputs can't be joined, because their shapes differ beyond the first "
            f"dimension ({error}). Use predict_on_batch for each batch."
        ) from error


def with_own(callbacks: CallbackList, verbose: Any, *own: Callback) -> CallbackList:
    """The user's callbacks, then fitkit's: they see what the user's have added to the logs."""
    added: list[Callback] = list(own)
    if verbose != 0 and not any(isinstance(c, ProgressBar) for c in callbacks.callbacks):
        added.append(ProgressBar(verbose=int(verbose) if isinstance(verbose, bool) else verbose))
    return CallbackList([*callbacks.callbacks, *added])


@contextlib.contextmanager
def closing(callbacks: CallbackList) -> Any:
    """Give the terminal back whatever happens."""
    try:
        yield
    finally:
        for callback in callbacks.callbacks:
            if isinstance(callback, ProgressBar):
                callback.close()


def _pass_params(stage: str, source: Source, job: PassJob) -> dict[str, Any]:
    return {
        "stage": stage,
        "epochs": 1,
        "initial_epoch": 0,
        "steps": job.steps or source.steps,
        "samples": source.samples,
        "batch_size": source.batch_size,
        "validation_steps": None,
        "verbose": job.verbose,
    }
