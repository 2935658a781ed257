"""`fit`, on each rank."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fitkit.callbacks import Callback, CallbackList, DeviceStatsMonitor, History
from fitkit.callbacks.base import SHORT_NAMES, overrides
from fitkit.callbacks.display import chosen_verbose
from fitkit.callbacks.watches import non_finite_losses
from fitkit.data.batches import NoRows
from fitkit.data.stream import Stream
from fitkit.distributed.sync_batchnorm import synchronized
from fitkit.errors import ConfigurationError, warn
from fitkit.modes import kept_in_evaluation, modes_restored, to_training
from fitkit.module import Module
from fitkit.random_states import random_state, set_random_state
from fitkit.training.evaluate import evaluate_source
from fitkit.training.explain import memory_explained
from fitkit.training.log import LazyLogs, reduced
from fitkit.training.optimizing import PlannedScheduler, warn_of_flags
from fitkit.training.own_step import StepContext, Step, running, step_for
from fitkit.training.rates import WarmUp, after_update, scale_rates, warm_up
from fitkit.training.resume import Progress, progress_of, restore, take_place
from fitkit.training.settings import FitArguments
from fitkit.training.snapshot import contents, weights_of
from fitkit.training.step import CompiledStep
from fitkit.training.surroundings import (
    backend_flags,
    closing,
    net_prepared,
    share_of,
    tell_of,
    unchanged_on_error,
    with_own,
)
from fitkit.training.update import Learning, learning_for, updaters_of

if TYPE_CHECKING:
    from fitkit.training.settings import Compilation


BATCH_HOOKS = (*SHORT_NAMES, *SHORT_NAMES.values())
"""Hooks in which a callback may stop an epoch."""


VALIDATION_NAME = re.compile(r"val(id|idation)?([_/.\-]|$)")
"""What names of a validation's values begin with, where they say it themselves."""


class Fit:
    """One call of `fit` on this rank.

    Args:
        model: what learns.
        compilation: what `compile` decided.
        arguments: what `fit` was asked.
    """

    def __init__(self, model: Module, compilation: Compilation, arguments: FitArguments) -> None:
        self.model = model
        self.compilation = compilation
        self.arguments = arguments
        self.strategy = compilation.strategy
        self.collectives = self.strategy.collectives
        self.strategy.place_for_training(model)
        self.collectives.broadcast_tensors([*compilation.loss_parameters()])
        self.source = share_of(arguments.source, compilation, training=True)
        self.held_out = (
            None
            if arguments.held_out is None
            else share_of(arguments.held_out, compilation, training=False)
        )
        self.resumed = arguments.resumed
        # Among how many the training's data are dealt out.
        self.shares = self.strategy.shares.world_size
        self.stream = Stream(
            self.source, arguments.steps_per_epoch, arguments.initial_epoch, self.shares
        )
        self.epoch = arguments.initial_epoch
        self.steps_done = self.steps_before = 0  # the latter before the epoch was cut
        self.logs: dict[str, Any] | None = None  # of the epoch that ended last, until the next
        self.carried: list[dict[str, Any]] = []  # what was noted of an epoch before it was cut
        if self.resumed is not None:
            take_place(self, self.resumed)
        held_out_target = None if self.held_out is None else self.held_out.target
        steps = self._updates_in_an_epoch()
        # The optimizers are made here, after the module has its place.
        self.optimizers = model._fitkit.fit_state.optimizers_for(model, compilation)
        warn_of_flags(model)
        self.strategy.begin_training(model, self.optimizers)
        self.stage, self.step = step_for(
            model,
            compilation,
            "training",
            class_weights=arguments.weights_by_class,
            all_targets=[self.source.target, held_out_target],
            source=self.source,
        )
        if arguments.weights_by_class is not None:
            arguments.weights_by_class.look_at(self.source.target, self.collectives.rank)
        self.step.mover.keep(self.source)
        factor = scale_rates(model._fitkit.fit_state, compilation.scale_lr, self.shares)
        self.schedulers = model._fitkit.fit_state.schedulers_for(
            model,
            compilation,
            epochs=arguments.epochs,
            initial_epoch=arguments.initial_epoch,
            steps=steps,
            resumes=self.resumed is not None,
        )
        self.warm_up = self._warm_up(steps, factor)
        self.at_epochs = [
            (plan, plan.mover())
            for plan in self.schedulers
            if plan.interval == "epoch" and model.automatic_optimization
        ]
        updaters = updaters_of(model, compilation, after_update=self._after_update)
        self.learn = learning_for(model, compilation, self.stage, self.step, updaters)
        self.learning = [p.requires_grad for p in compilation.trainable(model)]
        self.validation: tuple[StepContext, Step] | None = None
        self.kept: list[torch.nn.Module] = []  # what stays in evaluation mode
        self.told: list[PlannedScheduler] = []  # of which it was said that their value is missing
        self.history = History()
        self.told_non_finite = False

    def _warm_up(self, steps: int | None, factor: float) -> WarmUp | None:
        """The warm-up, from its beginning or from where it was."""
        before = None if self.resumed is None else self.resumed.warm_up
        begins = self.arguments.initial_epoch == 0 if self.resumed is None else before is not None
        epochs = self.compilation.warmup_epochs if begins else None
        found = warm_up(self.model._fitkit.fit_state.groups, epochs, steps, factor)
        if found is not None and before is not None:
            found.go_on(before)
        return found

    @property
    def is_between_groups(self) -> bool:
        """Whether no batch waits for others to make an update with it, so that a save is whole."""
        return self.learn.is_between_groups

    def contents(self, *, spread: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds at this moment: weights, and all else; tensors are those in use.

        Args:
            spread: whether what is spread over ranks stays so, for a folder.

        Ranks:
            Collective.
        """
        return contents(self.model, spread=spread)

    def weights(self, *, spread: bool = False) -> dict[str, Any]:
        """The weights in a checkpoint, as `contents` gives them."""
        return weights_of(self.model, spread=spread)

    def progress(self) -> Progress:
        """Where the training is.

        Ranks:
            Collective.
        """
        return progress_of(self)

    def note(self, steps: int) -> None:
        """Take note of how many of the epoch's steps are made."""
        self.steps_done = steps
        self.stream.note(steps)

    def _updates_in_an_epoch(self) -> int | None:
        """How many updates an epoch makes, where that is known."""
        steps = self.stream.steps
        if steps is None:
            return None
        return -(-steps // self.compilation.accumulate_grad_batches)

    def _after_update(self, optimizer: Optimizer) -> Callable[[], Any] | None:
        """What moves the rates after each of an optimizer's updates."""
        moves = [
            plan.mover()
            for plan in self.schedulers
            if plan.interval == "step" and plan.optimizer in (None, optimizer)
        ]
        return after_update(self.warm_up, moves, leads=optimizer is self.optimizers[0])

    def run(self) -> History:
        """Train for the epochs that were asked; the history of them."""
        model, arguments = self.model, self.arguments
        callbacks = with_own(arguments.callback_list, arguments.verbose, *self._own_callbacks())
        model.history, model.stop_training = self.history, False
        model._fitkit.batch_size = self.source.batch_size
        self._announce()
        callbacks.begin(model, self._params())
        trained = model._fitkit.fit_state.trains  # within an epoch of another fit
        try:
            flags = backend_flags(self.compilation)
            with flags, closing(callbacks), self._synchronized():
                model._fitkit.fit_state.run = self
                if not kept_in_evaluation(model._weights_module()):
                    model.train()
                callbacks.call("on_train_begin", {})
                self.kept = kept_in_evaluation(model._weights_module())
                restore(self)
                logs: dict[str, Any] = {}
                for epoch in range(arguments.initial_epoch, arguments.epochs):
                    logs = self._epoch(epoch, callbacks, logs)
                    if model.stop_training:
                        break
                callbacks.call("on_train_end", logs)
                model.history = self.history  # a callback may have called fit, too
                model._fitkit.fit_state.progress = self.progress()
                self.strategy.end_training()
        except BaseException as error:
            tell_of(error, callbacks)
            raise
        finally:
            model._fitkit.fit_state.run = None
            model.untoggle_optimizer(self.optimizers[0])
            if self.warm_up is not None:
                self.warm_up.end()
            self.strategy.finish()
            if trained != model._fitkit.fit_state.trains:
                model._fitkit.fit_state.train() if trained else model._fitkit.fit_state.eval()
        return self.history

    @contextlib.contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Let batch normalisation see all ranks' batches, where `compile` asked for that."""
        if self.compilation.sync_batchnorm and self.strategy.replicas > 1:
            raise ConfigurationError(
                f"sync_batchnorm=True can't be kept under strategy={self.strategy.name!r} with "
                f"{self.strategy.replicas} replicas in one process. Write strategy='ddp', where "
                "each device has a process of its own."
            )
        if not self.compilation.sync_batchnorm or self.collectives.world_size == 1:
            yield
            return
        with synchronized(self.model) as self.step.synchronization:
            yield

    def _own_callbacks(self) -> list[Callback]:
        """The history, after what `compile` has asked to be measured."""
        measured = self.compilation.log_gpu_memory
        watch = [] if measured is None else [DeviceStatsMonitor(log_gpu_memory=measured)]
        return [*watch, self.history]

    def _announce(self) -> None:
        """Say once where the training runs, unless that is a CPU alone, and what an update sees."""
        ranks, size = self.collectives.world_size, self.source.batch_size
        replicas, device = self.strategy.replicas, self.strategy.device
        alone = ranks * replicas == 1 and device.type == "cpu"
        if alone or self.collectives.rank or chosen_verbose(self.arguments.verbose) == 0:
            return
        shares = self.strategy.shares.world_size
        what = f"{ranks} processes" if ranks > 1 else "1 process"
        what += f" of {replicas} replicas each" if replicas > 1 else ""
        whole = f"{shares} x {size} = {shares * size}" if size and shares > 1 else f"{size}"
        batch = f", batches of {whole} samples" if size else ""
        every = self.compilation.accumulate_grad_batches
        if size and every > 1:
            batch += f", an update every {every} batches ({shares * size * every} samples)"
        where = device if ranks * replicas == 1 else device.type
        print(f"{what} on {where}{batch}", flush=True)

    def _epoch(self, epoch: int, callbacks: CallbackList, last: dict[str, Any]) -> dict[str, Any]:
        """One epoch; its logs, or the last epoch's where the data have run out."""
        self.kept = to_training(self.model, self.kept)
        self.model.current_epoch = epoch
        self.steps_done = done = self.steps_before
        resumes = self.resumed is not None and epoch == self.resumed.epoch
        if resumes and not done:
            self._go_on_drawing()
        self.step.begin()
        begun = resumes and done > 0
        with self.model._fitkit.fit_state.settings_kept() if begun else contextlib.nullcontext():
            callbacks.call("on_epoch_begin", epoch, {})
        self.epoch, self.logs = epoch, None
        self._follow_freezing()
        self.model._fitkit.fit_state.train(
            self.model._fitkit.fit_state.stored_weights if begun else None
        )
        if begun:
            self._go_on_drawing()
        batches = self.step.mover.fed(self.stream.epoch(done))
        group = self.compilation.steps_per_execution
        with running(self.model, self.stage):
            steps = train_batches(
                batches,
                self.stage,
                self.step,
                self.learn,
                callbacks,
                self._stops_now(),
                self.note,
                done,
                group,
            )
            if self._ran_out(epoch, steps):
                return last
            if steps == done:
                self._look_at_a_batch()
            self.step.finish()
        if self.arguments.weights_by_class is not None:
            self.arguments.weights_by_class.look_back(self.collectives)
        self.strategy.settle()
        self.model._fitkit.fit_state.eval()
        logs, _ = reduced(self.step.logbook, self.strategy.shares, self.carried)
        self.carried, self.steps_before = [], 0
        self.model._fitkit.log_names = list(logs)
        if self.held_out is not None and self.arguments.validates_after(epoch):
            values = self._validate(callbacks)
            named = {validation_name(name): value for name, value in values.items()}
            # Where a step logs both "x" and "val_x", the latter is meant.
            logs.update({**named, **{n: v for n, v in values.items() if validation_name(n) == n}})
        self._warn_of_non_finite(epoch, logs)
        self._schedule(epoch, logs)
        self.logs = logs
        callbacks.call("on_epoch_end", epoch, logs)
        if self.arguments.callback_list.callbacks:
            self.model.stop_training = self._any_stops()
        return logs

    def _warn_of_non_finite(self, epoch: int, logs: dict[str, Any]) -> None:
        """Say once that a loss is no number, on rank 0."""
        if self.told_non_finite or self.collectives.rank:
            return
        sentence = non_finite_losses(logs, self.arguments.callback_list.callbacks)
        if sentence is not None:
            self.told_non_finite = True
            warn(f"In epoch {epoch + 1} {sentence}")

    def _look_at_a_batch(self) -> None:
        """Learn which metrics there are, where an epoch was cut after its last batch."""
        if not isinstance(self.step, CompiledStep) or self.step.checked:
            return
        batch = self.stream.look()
        if batch is not None:
            drawn = random_state(self.stream.generators)
            with modes_restored(self.model), torch.no_grad():
                self.model.eval()
                self.step.look(batch)
            set_random_state(drawn, self.stream.generators)

    def _go_on_drawing(self) -> None:
        """Draw random numbers as the training would have that was cut."""
        assert self.resumed is not None
        state = self.resumed.of_rank(self.collectives.rank, "random")
        if state is not None:
            set_random_state(state, self.stream.generators)

    def _follow_freezing(self) -> None:
        """Wrap the module anew where a callback has frozen or freed parameters."""
        learning = [p.requires_grad for p in self.compilation.trainable(self.model)]
        if learning != self.learning:
            self.learning = learning
            self.strategy.rewrap()

    def _any_stops(self) -> bool:
        """Whether some rank's callbacks ask to stop."""
        return any(self.collectives.gather(self.model.stop_training))

    def _stops_now(self) -> Callable[[], bool] | None:
        """What tells after a batch whether to stop.

        On several ranks that takes an exchange, made only where a callback acts at batches that
        doesn't say it stops alike: nobody else stops one rank's epoch.
        """
        if self.collectives.world_size == 1:
            return lambda: self.model.stop_training
        acts = any(
            not callback.stops_alike and overrides(callback, hook)
            for callback in self.arguments.callback_list.callbacks
            for hook in BATCH_HOOKS
        )
        return self._any_stops if acts else lambda: self.model.stop_training

    def _ran_out(self, epoch: int, batches: int) -> bool:
        """Whether an epoch got no batches; fewer than asked end the training, with a warning."""
        asked = self.arguments.steps_per_epoch
        if batches >= (asked or 1) or (self.model.stop_training and batches > 0):
            return False
        if batches == 0 and epoch == self.arguments.initial_epoch:
            raise ConfigurationError("x is empty: it gave no batches.")
        wanted = f" of the {asked} that steps_per_epoch asks for" if asked else ""
        warn(f"x ended in epoch {epoch + 1} after {batches} batches{wanted}; training ends here.")
        self.model.stop_training = True
        return batches == 0

    def _validate(self, callbacks: CallbackList) -> dict[str, Any]:
        """The values of a pass over the validation data."""
        assert self.held_out is not None
        if self.validation is None:
            self.validation = step_for(
                self.model,
                self.compilation,
                "validation",
                all_targets=[self.held_out.target],
                source=self.held_out,
                name="validation_data",
            )
            self.validation[1].mover.keep(self.held_out)
        stage, step = self.validation
        with modes_restored(self.model):
            return evaluate_source(
                self.model,
                self.compilation,
                self.held_out,
                self.arguments.validation_steps,
                stage,
                step,
                callbacks,
                name="validation_data",
            )

    def _schedule(self, epoch: int, logs: dict[str, Any]) -> None:
        """The schedulers' steps at an epoch's end."""
        if self.warm_up is not None and not self.warm_up.is_over:
            return
        for plan, move in self.at_epochs:
            if not plan.watches:
                move()
            elif (epoch + 1) % plan.frequency == 0:
                self._watch(plan, epoch, logs)

    def _watch(self, plan: PlannedScheduler, epoch: int, logs: dict[str, Any]) -> None:
        """Give a scheduler the value that it watches."""
        watched = plan.monitor or ("val_loss" if self.held_out is not None else "loss")
        waits = self.held_out is not None and not self.arguments.validates_after(epoch)
        if watched in logs:
            plan.scheduler.step(logs[watched])
        elif not (waits and VALIDATION_NAME.match(watched)):
            self._tell_of_missing(plan, watched, logs)

    def _tell_of_missing(self, plan: PlannedScheduler, watched: str, logs: dict[str, Any]) -> None:
        """Refuse an epoch without the value that a scheduler watches, or say it once."""
        names = ", ".join(logs)
        if plan.monitor is not None:
            problem = f"lr_scheduler monitors {watched!r}, but the logs have {names}."
        else:
            problem = (
                f"ReduceLROnPlateau watches {watched!r} where lr_scheduler names no monitor, but "
                f'the logs have {names}. Write {{"scheduler": …, "monitor": …}} with one of these.'
            )
        if plan.strict:
            raise ConfigurationError(problem)
        if plan not in self.told:
            self.told.append(plan)
            warn(f"{problem} The scheduler waits until there is one.")

    def _params(self) -> dict[str, Any]:
        arguments = self.arguments
        validation = self.held_out.steps if self.held_out is not None else None
        return {
            "stage": "fit",
            "epochs": arguments.epochs,
            "initial_epoch": arguments.initial_epoch,
            "steps": self.stream.steps,
            "samples": self.source.samples,
            "batch_size": self.source.batch_size,
            "steps_per_execution": self.compilation.steps_per_execution,
            "validation": self.held_out is not None,
            "validation_steps": arguments.validation_steps or validation,
            "verbose": arguments.verbose,
        }


def validation_name(name: str) -> str:
    """A validation's value among an epoch's; what a step logs as `val_loss` or `valid/f1` stays."""
    return name if VALIDATION_NAME.match(name) else f"val_{name}"


def run_fit(model: Module, compilation: Compilation, arguments: FitArguments) -> History:
    """`fit` on this rank."""
    size = None if arguments.source is None else arguments.source.batch_size
    explained = memory_explained(model, compilation, "fit", size)
    with unchanged_on_error(model), net_prepared(model, compilation), explained:
        return Fit(model, compilation, arguments).run()


def train_batches(
    batches: Iterator[Any],
    stage: StepContext,
    step: Step,
    learn: Learning,
    callbacks: CallbackList,
    stops: Callable[[], bool] | None,
    note: Callable[[int], None],
    done: int = 0,
    group: int = 1,
) -> int:
    """Train on an epoch's batches.

    Args:
        stage: takes what hooks log.
        step: keeps the running values.
        learn: makes the updates.
        stops: whether some rank wants to stop; asked after each group. None where nobody can.
        note: takes the number of steps made, before anybody acts at a batch's end.
        done: how many of the epoch's steps were made before it was cut.
        group: batches between two calls of the batch hooks, counted from the epoch's begin: a
            training that was cut within a group goes on with its rest.

    Returns:
        How many batches of the epoch were read.

    Raises:
        ConfigurationError: no batch of the epoch had rows.
    """
    begin = callbacks.hooks("on_train_batch_begin")
    end = callbacks.hooks("on_train_batch_end")
    logbook = step.logbook
    results = logbook.results
    index = done - 1
    empty = 0
    waits = False  # the group's batches so far, for the hooks at its end
    for index, batch in enumerate(learn.watch(batches), done):
        if batch is NoRows:
            empty += 1
        else:
            if begin and not waits:
                stage.open(begin, index, {})
            learn(batch, index)
            if stage.waiting:
                stage.take_waiting()
            if index == done + empty:
                step.after_first()
            waits = True
        if end:
            note(index + 1)
        if not waits or (index + 1) % group:
            continue
        waits = False
        if end:
            logs = LazyLogs(results, logbook.loss.last)
            for hook in end:
                hook(index, logs)
        if stops is not None and stops():
            break
    if waits:
        logs = LazyLogs(results, logbook.loss.last)
        for hook in end:
            hook(index, logs)
    learn.finish()
    note(index + 1)
    if empty and empty == index + 1:
        raise ConfigurationError(f"x is empty: none of the epoch's {empty} batches has rows.")
    logbook.steps = index + 1 - done - empty
    return index + 1
