"""`fit` on each rank: its setup, its epochs and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator
from functools import partial

import torch

from fitkit.arguments import chosen_verbose
from fitkit.callbacks import Callback, CallbackList, History
from fitkit.callbacks.callback_list import report_error
from fitkit.callbacks.monitor import why_none
from fitkit.callbacks.progress import with_built_in
from fitkit.compilation import Compilation
from fitkit.data.batches import Batch, Source
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.guests import guest_of
from fitkit.modes import kept_in_evaluation, modes_restored, to_training
from fitkit.module import Module
from fitkit.printing import say
from fitkit.progress import Progress
from fitkit.random_states import kept_random_numbers
from fitkit.scopes import Scope
from fitkit.tensors import first_spoiled
from fitkit.training.fit_data import FitData
from fitkit.training.fit_learning import FitLearning
from fitkit.training.log import LazyLogs, Logbook, noted_by, reduced, warn_of_empty
from fitkit.training.net_call import forward_of
from fitkit.training.own_step import OwnStep
from fitkit.training.passes import TRAINING, Pass, users_look
from fitkit.training.resume import give_states, states_of
from fitkit.training.settings import FitArguments
from fitkit.training.snapshot import contents, weights_of
from fitkit.training.step_context import StepContext, Waiting, as_current
from fitkit.training.stopping import Stopping
from fitkit.training.surroundings import surroundings
from fitkit.training.validation_names import validation_name
from fitkit.training.validations import Validations
from fitkit.training.where import say_where
from fitkit.typing import PlainData, Values


def run_fit(model: Module, arguments: FitArguments) -> History:
    """Run `fit` on this rank."""
    state, strategy = model._fitkit.fit_state, model._fitkit.compilation.strategy
    with Scope() as scope:
        scope.enter_context(surroundings(model, "fit", arguments.source.batch_size))
        scope.enter_context(state.weights_restored())  # another fit's epoch may have called this
        scope.enter_context(strategy.during_training())
        scope.callback(setattr, state, "run", state.run)
        state.stored_added = None  # the objects of this fit have it from now on
        run = Fit(model, arguments, scope)
        scope.callback(model.untoggle_optimizer, run.learning.optimizers[0])
        callbacks = with_built_in(
            arguments.callback_list, arguments.verbose, *run.built_in_callbacks()
        )
        model.history, model.stop_training = run.history, False
        model._fitkit.batch_size = run.data.source.batch_size
        if chosen_verbose(arguments.verbose) != 0:
            say_where(strategy, run.data.source.batch_size, run.learning.accumulate)
        with callbacks.running(model, run.params()):
            try:
                run.all_epochs(callbacks)
            except BaseException as error:
                # Use the batches before the error, as single steps would.
                run.learning.update.flush()
                report_error(error, callbacks.hooks("on_exception"))
                raise
    return run.history


class Fit:
    """Holds the state of one call of `fit` on this rank.

    Args:
        model: the model to train.
        arguments: the arguments of `fit`.
        scope: the call's.
    """

    def __init__(self, model: Module, arguments: FitArguments, scope: Scope) -> None:
        self.model = model
        self.arguments = arguments
        self._scope = scope
        compilation = model._fitkit.compilation
        self.compilation: Compilation = compilation
        self.strategy: Strategy = compilation.strategy
        self.collectives: Collectives = self.strategy.collectives
        compilation.trained(model).place(self.strategy, for_training=True)
        self.data: FitData = FitData(model, arguments)
        self.validations: Validations = Validations(model, arguments)
        self.held_out: dict[str, Source] = self.validations.sources
        self.current: Pass | None = None  # the epoch's; None between epochs
        self.latest: Pass | None = None  # the same, or the last epoch's
        self.logs: Values | None = None  # of the last epoch, until the next one begins
        self.seen_values: Values = {}
        self.validated_names: set[str] = self.validations.names
        if self.progress.validated is not None:
            self.validated_names.update(self.progress.validated["values"])
        self.doubts: list[str] = []
        self.validations.plan_for(self.data.stream.steps)
        model._fit_begins(self)
        self.stopping: Stopping = Stopping(model, self.collectives, self.callbacks)
        held_out = [*self.held_out.values()]
        self.learning: FitLearning = FitLearning(model, arguments, self.data, held_out, scope)
        self.in_evaluation: list[torch.nn.Module] = []  # submodules that stay in evaluation mode
        self.history: History = History()
        self.has_warned_of_non_finite: bool = False
        self.has_named_non_finite: bool = False  # with samples, or an epoch's end had none to name
        self.has_warned_of_empty: bool = False

    def _follow_size(self) -> None:
        """Let everything know that the batches have another size.

        Ranks:
            Collective.
        """
        size, steps = self.data.source.batch_size, self.data.stream.steps
        self.validations.plan_for(steps)
        self.model._fitkit.batch_size = size
        # The callbacks share this dict.
        self.history.params.update(steps=steps, batch_size=size)

    def all_epochs(self, callbacks: CallbackList) -> None:
        """Train for all epochs, between the first and the last hook."""
        model, arguments = self.model, self.arguments
        state = model._fitkit.fit_state
        with self.batch_norms_synchronized():
            state.run = self
            if not kept_in_evaluation(model._weights_module()):
                model.train()
            with Scope() as scope:
                context = self.learning.new_context(scope)
                with as_current(model, context):  # its logs join the first epoch's
                    callbacks.call("on_train_begin", {})
            self.warn_of_doubts()
            self.in_evaluation = kept_in_evaluation(model._weights_module())
            resumed = arguments.resumed
            if resumed is not None:  # after on_train_begin, which resets callbacks
                self.history.load_state_dict(resumed.history)
                give_states(arguments.callback_list.callbacks, resumed.callbacks)
                state.undo = None
            logs: Values = {n: values[-1] for n, values in self.history.history.items()}
            # A callback may have ended the training in the epoch of the checkpoint.
            has_ended = resumed is not None and not self.progress.steps and self.stopping.agreed()
            for epoch in range(arguments.initial_epoch, 0 if has_ended else arguments.epochs):
                logs = self.run_epoch(epoch, callbacks, logs, context.waiting)
                if model.stop_training:
                    break
            callbacks.call("on_train_end", logs)
            model.history = self.history  # a callback may have called fit
            state.progress = self.checkpoint_progress()
            # Workers discard their models after a call.
            is_wanted = self.collectives.rank == 0 or not self.strategy.reads_on_rank_zero
            self.strategy.end_engine(wanted=is_wanted)

    def built_in_callbacks(self) -> list[Callback]:
        """Return the history, preceded by the callbacks that `compile` asked for, and followed by
        what compares several ranks.
        """
        found: list[Callback] = [self.history]
        given = self.compilation.given
        if given.log_gpu_memory is not None:
            from fitkit.callbacks import DeviceStatsMonitor

            found.insert(0, DeviceStatsMonitor(log_gpu_memory=given.log_gpu_memory))
        if given.out_of_memory == "split":
            from fitkit.extras.splitting import PartsReport

            found.insert(0, PartsReport(self.learning.update))
        if self.collectives.world_size > 1 and self.strategy.ranks_per_batch == 1:
            from fitkit.extras.ranks_alike import RanksAlike

            found.append(RanksAlike())
        return found

    @contextlib.contextmanager
    def batch_norms_synchronized(self) -> Iterator[None]:
        """Compute batch normalisation over all ranks' batches, if `compile` asked for it."""
        if self.compilation.given.sync_batchnorm and self.strategy.replicas > 1:
            raise ConfigurationError(
                f"sync_batchnorm=True doesn't work with strategy={self.strategy.name!r}, which "
                f"has {self.strategy.replicas} replicas in one process. Write strategy='ddp', "
                "which has a process for each device."
            )
        if not self.compilation.given.sync_batchnorm or self.collectives.world_size == 1:
            yield
            return
        from fitkit.extras.sync_batchnorm import synchronized

        guest = guest_of(self.model)
        with synchronized(self.model) as self.learning.step.synchronization:
            if guest is None:
                yield
            else:
                with guest.synchronized(self.learning.step.synchronization):
                    yield

    def run_epoch(
        self, epoch: int, callbacks: CallbackList, last: Values, early: list[Waiting]
    ) -> Values:
        """Train for an epoch, validate, and call the callbacks.

        Args:
            last: the last epoch's logs.
            early: what was logged before the first epoch.

        Returns:
            The epoch's logs, or the last epoch's logs if the data have run out.

        Raises:
            ConfigurationError: no batch of the epoch had rows.
        """
        # After an error it ends with the call: on_exception may save the epoch as it was.
        scope = self._scope.enter_context(Scope())
        made = self._begin_epoch(epoch, callbacks, scope, early)
        context, done = made.context, made.done
        with as_current(self.model, context):
            batches = self.learning.brought(self.data.batches(epoch, done), done)
            # A hook may have ended the epoch on one rank. An interrupted one may also begin with a
            # validation, which may end it.
            stops = self.stopping.agreed()
            if done and (stops or self._validate_if_due(epoch, callbacks)):
                batches = iter(())
            made.run(batches, partial(self._after_group, epoch, callbacks))
            if made.empty and len(made.empty) == made.done:
                raise ConfigurationError(f"x is empty: all {made.done} batches have 0 samples.")
            if self.data.ran_out(epoch, made.done):
                return last
            if made.done == done:
                self._check_on_peeked_batch()
            self.learning.step.call_epoch_end(context.record)
        values = self._reduced_and_validated(epoch, callbacks, context.record, steps=made.done)
        self._end_epoch(epoch, callbacks, context, values)
        scope.close()
        return values

    def _after_group(self, epoch: int, callbacks: CallbackList) -> bool:
        """Validate between two groups of batches, if that is due; return whether the epoch ends."""
        stopping = self.stopping
        if stopping.agreed() if stopping.asks else self.model.stop_training:
            return True
        return self.validations.plan.interval is not None and self._validate_if_due(
            epoch, callbacks
        )

    def _begin_epoch(
        self, epoch: int, callbacks: CallbackList, scope: Scope, early: list[Waiting]
    ) -> Pass:
        """Begin an epoch, or go on where it was interrupted; return its pass."""
        model, state = self.model, self.model._fitkit.fit_state
        self.in_evaluation = to_training(model, self.in_evaluation)
        model.current_epoch = epoch
        if self.data.cut_for(epoch):
            self._follow_size()
        done = self.progress.steps
        context = self.learning.new_context(scope)
        if not done:
            context.waiting += early
            self.data.restore_random_state()
        early.clear()
        self.current = self.latest = made = self._pass_of(context, epoch, callbacks, done)
        # These hooks ran before an interruption. What they log, draw and set now goes nowhere.
        with state.settings_restored() if done else contextlib.nullcontext():
            with as_current(model, self.learning.new_context(scope) if done else context):
                callbacks.call("on_epoch_begin", epoch, {})
            self.logs, self.seen_values = None, {}
            self.learning.follow_freezing()
        state.use_training_weights(state.stored_weights if done else None)
        if done:
            self.data.restore_random_state()
        return made

    def _pass_of(
        self, context: StepContext, epoch: int, callbacks: CallbackList, done: int
    ) -> Pass:
        """Return an epoch's pass."""
        record, learn = context.record, self.stopping.watched(self.learning.update)
        is_first = epoch == self.arguments.initial_epoch
        return Pass(
            TRAINING,
            context,
            callbacks,
            self.learning.executor(learn, record, is_first=is_first),
            partial(_logs, weakref.ref(self), record, epoch),
            group=self.learning.group,
            done=done,
            looks=self.validations.plan.interval is not None
            or self.stopping.asks
            or users_look(callbacks, TRAINING),
        )

    def _reduced_and_validated(
        self, epoch: int, callbacks: CallbackList, record: Logbook, *, steps: int
    ) -> Values:
        """Return an epoch's values over all ranks, those of its validation included."""
        model, progress = self.model, self.progress
        state = model._fitkit.fit_state
        if self.arguments.weights_by_class is not None:
            self.arguments.weights_by_class.check_seen(self.collectives)
        if self.strategy.engine is not None:
            self.strategy.engine.average_ranks()
        state.use_evaluation_weights()
        values, _ = reduced(record, self.strategy.log_ranks, progress.noted)
        model._fitkit.log_names = list(values)
        if self.held_out and self.arguments.validates_after(epoch):
            before = progress.validated
            if before and (before["steps"], before["updates"]) == (steps, state.updates):
                self.seen_values = before["values"]  # unchanged since then
                values.update(self.seen_values)
            else:
                values.update(self._validate(callbacks, epoch))
        return values

    def _end_epoch(
        self, epoch: int, callbacks: CallbackList, context: StepContext, values: Values
    ) -> None:
        """Give an epoch's values to schedulers, then to callbacks, which may add their own."""
        if epoch == self.arguments.initial_epoch:
            self._tell_wait()
        self.warn_of_non_finite(epoch, values)
        if epoch + 1 == self.arguments.epochs:
            self._warn_of_spoiled(epoch, values)
        self.learning.rates.after_epoch(epoch, values, self.seen_values)
        self.logs = values
        place, self.current = self.progress, None
        place.end_epoch(ends_pass=self.data.passes_are_epochs)
        with as_current(self.model, context):
            ended = callbacks.hooks("on_epoch_end")
            # The last two are what the hooks get.
            context.call_at_end(ended, values, self.strategy.data_ranks, epoch, values)
        if not self.has_warned_of_empty and self.collectives.rank == 0:
            self.has_warned_of_empty = warn_of_empty(values, f"In epoch {epoch + 1}")
        self.stopping.agreed()

    def warn_of_non_finite(self, epoch: int, logs: Values, batch: int | None = None) -> None:
        """Warn on rank 0 that a loss isn't finite: once, and again when its samples are known.

        Args:
            batch: the batch after which rank 0 reads the logs; None at an epoch's end.

        Ranks:
            Collective at an epoch's end.
        """
        is_early = batch is not None
        if self.has_named_non_finite or (
            is_early and (self.has_warned_of_non_finite or self.collectives.rank)
        ):
            return
        losses = [validation_name("loss", name) for name in self.held_out]
        lost = self.arguments.callback_list.lost_losses(logs, losses)
        if lost is not None:
            from fitkit.extras.bad_numbers import words_of_lost

            is_first = not self.has_warned_of_non_finite
            words, is_named = words_of_lost(self, lost, is_first=is_first, is_early=is_early)
            self.has_warned_of_non_finite = True
            self.has_named_non_finite = is_named or not is_early
            if words:
                warn(f"In epoch {epoch + 1}{f', by batch {batch},' if is_early else ''} {words}")

    def _warn_of_spoiled(self, epoch: int, values: Values) -> None:
        """Warn on rank 0 that the last update's gradient wasn't finite: no later loss shows it.

        Ranks:
            Collective.
        """
        if not math.isfinite(values.get("loss", 0.0)):  # which said it, if it means anything
            return
        learned = ((n, w) for n, w in self.model.named_parameters() if w.requires_grad)
        names = [name for name in self.collectives.gather(first_spoiled(learned)) if name]
        if names:
            from fitkit.extras.bad_numbers import words_of_spoiled

            words = words_of_spoiled(self, names[0])
            if self.collectives.rank == 0:
                warn(f"In epoch {epoch + 1} {words}")

    def _tell_wait(self) -> None:
        """Note how long the first epoch waited for data; say it, on rank 0, if that was long."""
        self.history.params["data_wait"] = self.data.wait.share  # callbacks share this dict
        line = self.data.wait.line()
        is_silent = self.collectives.rank or chosen_verbose(self.arguments.verbose) == 0
        if line is not None and not is_silent:
            say(line)

    def _check_on_peeked_batch(self) -> None:
        """Find the metrics' names if an epoch was interrupted after its last batch."""
        step = self.learning.step
        if isinstance(step, OwnStep) or step.seen is not None:
            return
        batch = self.data.stream.peek()
        if all(there for there in self.collectives.gather(batch is not None)):
            kept = kept_random_numbers(self.data.stream.generators)
            with kept, modes_restored(self.model), torch.no_grad():
                self.model.eval()
                wrapped = self.compilation.strategy.wrap_for_evaluation(self.model)
                # Without DDP, but with gathering of sharded weights.
                forward = step.net.in_precision(forward_of(wrapped))
                step.compute(forward, *step.moved_parts(batch))

    def follow_freezing(self) -> None:
        """Wrap the module again if a callback has frozen or unfrozen parameters."""
        self.learning.follow_freezing()

    def _validate_if_due(self, epoch: int, callbacks: CallbackList) -> bool:
        """Validate within an epoch where that is due; return whether training stops.

        A validation waits for a whole update. Schedulers and callbacks get its values.
        """
        steps, validated = self.progress.steps, self.progress.validated
        last = 0 if validated is None else validated["steps"]
        if not (self.validations.plan.is_due(steps, last) and self.is_between_updates):
            return False
        values = self._validate(callbacks, epoch)
        updates = self.model._fitkit.fit_state.updates
        self.progress.validated = {"steps": steps, "updates": updates, "values": dict(values)}
        self.learning.rates.after_validation(epoch, values)
        callbacks.call("on_validation_within_epoch", steps - 1, values)
        return self.stopping.agreed()

    def _validate(self, callbacks: CallbackList, epoch: int) -> Values:
        """Evaluate the validation data; return the values by their names in an epoch's logs."""
        values = self.validations.values(callbacks, self.history.params)  # callbacks share it
        if self.validations.plan.interval is not None:
            entry = {"epoch": epoch, "batches": self.progress.steps, **values}
            self.history.validations.append(entry)
        return values

    def as_validated(self) -> contextlib.AbstractContextManager[None]:
        """Give the model the weights that its validations see, for the length of a block.

        Ranks:
            Collective.
        """
        return self.arguments.callback_list.as_validated()

    @property
    def steps_done(self) -> int:
        """The steps of the epoch whose hooks are called."""
        return 0 if self.latest is None else self.latest.done

    @property
    def batch(self) -> Batch | None:
        """The batch of the last step; None between epochs."""
        return None if self.current is None else self.current.context.batch

    @property
    def progress(self) -> Progress:
        """Where the training is: after the last batch of the pass that runs. Asking moves it."""
        place = self.data.place
        if self.current is not None:
            # With steps_per_epoch, the stream counts the batches of its passes.
            place.go_on(self.current.done, counts=self.data.passes_are_epochs)
        return place

    @property
    def callbacks(self) -> list[Callback]:
        """The user's callbacks."""
        return self.arguments.callback_list.callbacks

    def warn_of_doubts(self) -> None:
        """Say once, on rank 0, which monitored values can't come."""
        params = self.params()
        for name in self.learning.rates.watched_at_epochs():
            if (why := why_none(name, self.model, params)) is not None:
                self.doubts.append(f"lr_scheduler monitors {name!r}, but {why}")
        if self.doubts and self.collectives.rank == 0:
            warn(" ".join(self.doubts), code="FK031")

    @property
    def is_between_updates(self) -> bool:
        """Whether no batch waits for others to complete an update, so that a save is complete."""
        return self.learning.is_between_updates

    def checkpoint_progress(self) -> Progress:
        """Return how far the training is on all ranks, as a checkpoint stores it.

        Raises:
            ConfigurationError: batches wait for others to make an update with them.

        Ranks:
            Collective.
        """
        if not self.is_between_updates:
            every = self.model._fitkit.fit_state.accumulate
            raise ConfigurationError(
                f"A checkpoint can't be saved within an update, and {every} batches make one "
                f"update. Save after a batch for which (batch + 1) % {every} == 0, or use "
                "fitkit.callbacks.ModelCheckpoint, which waits for the update."
            )
        progress = self.progress
        noted = progress.noted if progress.steps else []  # of the epoch, before it was cut
        if progress.steps and self.current is not None:
            record = self.current.context.record
            # Ranks that see the same data have noted the same values.
            noted = record.joined or [
                *noted, *self.strategy.log_ranks.gather(noted_by(record, self.collectives.rank))
            ]  # fmt: skip
        history = History()
        history.load_state_dict(self.history.state_dict())
        if self.logs is not None and progress.epoch - 1 not in history.epoch:
            # The history is updated after the callbacks, one of which may be saving now.
            history.on_epoch_end(progress.epoch - 1, self.logs)
        begins_pass = self.logs is not None and self.data.passes_are_epochs
        saved = dataclasses.replace(
            progress,
            noted=noted,
            history=history.state_dict(),
            warm_up=self.learning.rates.state(),
            callbacks=states_of(self.callbacks),
            **self.data.saved(ends_pass=begins_pass),
        )
        saved.data.update(self.learning.saved_data())
        return saved

    def contents(
        self, *, spread: bool = False, trainable_only: bool = False
    ) -> tuple[PlainData, PlainData]:
        """Return a checkpoint's weights, and all its other contents; tensors aren't copied.

        Args:
            spread: whether shards stay on their ranks, for a checkpoint folder.
            trainable_only: whether to leave out frozen parameters.

        Ranks:
            Collective.
        """
        return contents(self.model, spread=spread, trainable_only=trainable_only)

    def weights(self, *, spread: bool = False, trainable_only: bool = False) -> PlainData:
        """Return the weights in a checkpoint, as `contents` does."""
        return weights_of(self.model, spread=spread, trainable_only=trainable_only)

    def params(self) -> PlainData:
        """Return what callbacks are given in `params`."""
        arguments = self.arguments
        first = next(iter(self.held_out.values()), None)
        steps = arguments.validation_steps or (None if first is None else first.steps)
        return {
            "stage": "fit",
            "epochs": arguments.epochs,
            "initial_epoch": arguments.initial_epoch,
            "steps": self.data.stream.steps,
            "samples": self.data.source.samples,
            "batch_size": self.data.source.batch_size,
            "steps_per_execution": self.learning.group,
            "validation": bool(self.held_out),
            "validation_sets": [name for name in self.held_out if name],
            "validation_steps": steps,
            "validation_freq": arguments.validation_freq,
            "verbose": arguments.verbose,
        }


def _logs(fit: weakref.ref[Fit], record: Logbook, epoch: int, index: int) -> LazyLogs:
    """Return what hooks get after a batch.

    Args:
        fit: isn't kept: in a ring, data workers would outlive an error.
    """

    def read() -> Values:
        values = record.results()
        if (running := fit()) is not None:
            running.warn_of_non_finite(epoch, values, index)
        return values

    return LazyLogs(read, record.loss.last, record.loss.last_count)
