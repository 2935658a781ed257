"""The hooks of a `LightningModule` around fitkit's verbs, in Lightning's order."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from fitkit.extras.lightning_base import ServedModel
from fitkit.extras.lightning_hooks import TRANSFERS
from fitkit.extras.lightning_trainer import tensors_in
from fitkit.extras.lightning_updates import AROUND_UPDATES, HookedUpdates
from fitkit.seams.callbacks import Callback, Logs, from_all_ranks


def hooks_updates(model: ServedModel) -> bool:
    """Return whether something is around each update, so that it isn't compiled as a whole.

    A schedule of every so many batches is: Lightning counts the batches of an epoch, not updates.
    """
    plans = model._fitkit.fit_state.schedulers
    return (
        model.hooks.has(*AROUND_UPDATES, *TRANSFERS)
        or model._fitkit.compiler is None
        or any(
            plan.frequency > 1 and getattr(plan, "every", plan.interval) == "step" for plan in plans
        )
    )


class Watcher(Callback):
    """Calls a module's hooks of a run: all but those at the batches of a training.

    The first of a run's callbacks, so that what hooks log is there for the others.

    Args:
        stage: of the verb, by Lightning's name: `"fit"`, `"validate"`, `"test"`, `"predict"`.

    Attributes:
        is_evaluated: whether a hook has put the whole module into evaluation mode for the training.
    """

    model: ServedModel
    stops_alike = True
    each_batch = True
    is_evaluated: bool = False

    def __init__(self, stage: str) -> None:
        self.stage = stage

    @property
    def calls_users_code(self) -> bool:
        """Whether the module has hooks that may log at the end of an epoch or an evaluation."""
        return self.model.hooks.has("on_train_epoch_end", "on_validation_end", "on_test_end")

    # ------------------------------------------------------------------ fit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.model.trainer.enter(self.stage, "train")
        self.model.trainer.epochs_over = 0
        self.model.current_epoch = self.model.run.arguments.initial_epoch
        self.model.stop_training = self.model.stops_early
        self._take_updates()
        hooks = self.model.hooks
        hooks.ask("on_fit_start")
        hooks.ask("on_train_start")
        self.is_evaluated = not any(part.training for part in self.model.net.modules())

    def _take_updates(self) -> None:
        """Put the module's hooks around the run's updates, until the run ends."""
        model = self.model
        if not hooks_updates(model):
            return
        run = model.run
        run.learning.update = HookedUpdates(
            model, run.learning.update, run.validations.plan.epoch_steps
        )
        vars(model)["hooked_updates"] = run.learning.update
        self.add_cleanup(vars(model).update, hooked_updates=None)
        if not model.automatic_optimization and model.hooks.has("on_before_optimizer_step"):
            for optimizer in model._fitkit.fit_state.optimizers:
                handle = optimizer.register_step_pre_hook(self._before_step)
                self.add_cleanup(handle.remove)

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        """Call the hook before a step of the module's own: after each closure, if it has one."""
        hook = partial(self.model.hooks.call, "on_before_optimizer_step", optimizer)
        own, *placed = arguments
        closure = placed[0] if placed else named.get("closure")
        if closure is None:
            hook()
            return None

        def then_hook() -> Any:
            found = closure()
            hook()
            return found

        if placed:
            return (own, then_hook, *placed[1:]), named
        return arguments, {**named, "closure": then_hook}

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self.is_evaluated:
            self.is_evaluated = False
            self.model.net.eval()
        trainer = self.model.trainer
        self.model.written.clear()
        trainer.log_held()
        if not self.model.run.steps_done:
            trainer.began = dict(trainer.values)
        with trainer.showing(trainer.began):  # also if the epoch was interrupted
            self.model.hooks.ask("on_train_epoch_start")
        vars(self.model)["evaluated"] = in_evaluation(self.model.net)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.as_written(logs)
        self.model.trainer.note(logs)
        if self.model.hooked_updates is not None:
            self.model.hooked_updates.after_validation()
        self.model.hooks.ask("on_train_epoch_end")  # what it logs is in the logs after it

    def on_validation_within_epoch(self, batch: int, logs: Any = None) -> None:
        self.model.as_written(logs)
        self.model.trainer.note(logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        hooks = self.model.hooks
        self.model.trainer.epochs_over = int(self.model.run.latest is not None)
        hooks.ask("on_train_end")
        hooks.ask("on_fit_end")
        self._note_flags(self.model.lent)

    def _note_flags(self, lent: Collection[torch.nn.Module] = ()) -> None:
        """Note the modes in which the module's hooks leave it; parts that are lent go back."""
        parts = self.model.net.modules()
        vars(self.model)["left_flags"] = [(part, part.training or part in lent) for part in parts]

    def on_exception(self, error: BaseException) -> None:
        self.model.on_exception(error)

    # ------------------------------------------------------------------ evaluate, validations

    @property
    def _evaluated(self) -> str:
        return "test" if self.stage == "test" else "validation"

    def _place(self) -> tuple[bool, bool, int | None]:
        """Whether a validation's set is the first and the last of several, and its number."""
        sets = self.model.validation_sets
        number = sets.index(self.params["validation_set"]) if len(sets) > 1 else None
        return not number, number in (None, len(sets) - 1), number

    def on_test_begin(self, logs: Logs | None = None) -> None:
        hooks, stage = self.model.hooks, self._evaluated
        is_first, _, self.model.loader = self._place()
        self.model.trainer.enter(self.stage, "validate" if stage == "validation" else "test")
        if is_first:
            with torch.no_grad():
                hooks.ask(f"on_{stage}_start")
                hooks.ask(f"on_{stage}_epoch_start")

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._begin_batch(self._evaluated, batch)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._end_batch(self._evaluated, batch)

    def on_test_end(self, logs: Any = None) -> None:
        hooks, stage = self.model.hooks, self._evaluated
        _, is_last, _ = self._place()
        self.model.trainer.note(logs)
        if is_last:
            with torch.no_grad():
                hooks.ask(f"on_{stage}_end")
                hooks.ask(f"on_{stage}_model_train")
            if self.stage != "fit" and hooks.has(f"on_{stage}_model_train"):
                self._note_flags()
        if self.stage == "fit":
            # A rank without a batch of this set has logged nothing.
            self.model.written.update(*from_all_ranks(self.model, self.model.written))
            self.model.trainer.enter("fit", "train")

    # ------------------------------------------------------------------ predict

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        hooks = self.model.hooks
        self.model.trainer.enter(self.stage, "predict")
        with torch.no_grad():
            hooks.ask("on_predict_start")
            hooks.ask("on_predict_epoch_start")

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._begin_batch("predict", batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        hooks = self.model.hooks
        if hooks.has("predict_step"):  # its end was the batch's
            hooks.forget_batch()
        else:
            hooks.outputs = logs["outputs"]
            self._end_batch("predict", batch)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        hooks = self.model.hooks
        with torch.no_grad():
            hooks.ask("on_predict_epoch_end")
            hooks.ask("on_predict_end")

    # ------------------------------------------------------------------ batches of a pass

    def _begin_batch(self, stage: str, index: int) -> None:
        model = self.model
        context: Any = model._fitkit.contexts.current
        moved = model.hooks.begin_batch(model, context.batch)
        model.hooks.at_batch(f"on_{stage}_batch_start", moved, index, loader=model.loader)

    def _end_batch(self, stage: str, index: int) -> None:
        model = self.model
        context: Any = model._fitkit.contexts.current
        hooks = model.hooks
        batch = hooks.moved(model, context.batch.data)
        hooks.at_batch(f"on_{stage}_batch_end", hooks.outputs, batch, index, loader=model.loader)
        hooks.forget_batch()


def watcher_for(model: ServedModel, stage: str) -> Watcher:
    """Return a watcher whose class has only the hooks at batches that the module needs."""
    hooks = model.hooks
    left_out = [
        name
        for name, stages in (("test", ("validation", "test")), ("predict", ("predict",)))
        if not hooks.has(*(f"on_{one}_batch_{when}" for one in stages for when in ("start", "end")))
    ]
    return LEAN[tuple(left_out)](stage)


def _without(*stages: str) -> type[Watcher]:
    names = [f"on_{stage}_batch_{when}" for stage in stages for when in ("begin", "end")]
    body: dict[str, Any] = {name: getattr(Callback, name) for name in names}
    body["__module__"] = __name__
    name = "Watcher" + "".join(f"Without{stage.title()}" for stage in stages)
    made = type(name, (Watcher,), body)
    globals()[name] = made  # so that pickles find it
    return made


LEAN: dict[tuple[str, ...], type[Watcher]] = {
    (): Watcher,
    ("test",): _without("test"),
    ("predict",): _without("predict"),
    ("test", "predict"): _without("test", "predict"),
}
"""Watchers without the hooks at batches of these stages, which then cost nothing."""


class EpochEnd(Callback):
    """Ends an epoch after its last hook of the module: moves the schedulers that watch a value, and
    notes what the hooks have left in evaluation mode, which stays so. Files have its values.
    """

    model: ServedModel
    stops_alike = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.trainer.note(logs)
        updates = self.model.hooked_updates
        if updates is not None and updates.is_last:  # not where a stop has cut the epoch
            updates.move_rates("epoch", watching=True, values=logs)
        self.model.run.in_evaluation = [*in_evaluation(self.model.net) - self.model.lent]
        self.model.trainer.resumed = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the values that hooks and schedulers find when the training goes on.

        Ranks:
            Collective: each has its own of the last step.
        """
        trainer = self.model.trainer
        latest = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
        return {
            "began": tensors_in(trainer.began),
            "values": tensors_in(trainer.values),
            "latest": from_all_ranks(self.model, latest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give them back. Files of earlier versions have none."""
        trainer = self.model.trainer
        trainer.began = dict(state.get("began", {}))
        trainer.values.update(state.get("values", {}))
        latest = state.get("latest", {})
        found = [latest] if isinstance(latest, dict) else latest  # earlier, rank 0's
        ranks = self.model._fitkit.compilation.strategy.collectives
        is_known = len(found) == ranks.world_size
        trainer.resumed = dict(found[ranks.rank]) if is_known else means_of(found)


def means_of(values: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the means of several ranks' values, by name."""
    names = {name: None for one in values for name in one}
    return {
        name: torch.stack([one[name] for one in values if name in one]).mean(0) for name in names
    }


class OthersModes(Callback):
    """Notes what fitkit's callbacks put into evaluation mode for an epoch, which ends with it."""

    model: ServedModel
    stops_alike = True
    comes_last = True

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        vars(self.model)["lent"] = in_evaluation(self.model.net) - self.model.evaluated


def in_evaluation(net: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the parts of a net that are in evaluation mode."""
    return {part for part in net.modules() if not part.training}
