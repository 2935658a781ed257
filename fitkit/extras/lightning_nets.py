"""LightningModules, trained as they are: their steps, hooks and optimizers, by fitkit's verbs.

`fitkit.Model(module)` makes a `LightningModel` of a `LightningModule`. `lightning` isn't imported:
such a module is known by the names of its bases. What the module calls is in
`lightning_services.py`, its hooks in `lightning_hooks.py`. Those around updates are called in
`lightning_updates.py`, all others in `lightning_watcher.py`. `lightning_trainer.py` has what it
sees as its trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

import fitkit.callbacks
from fitkit import trees
from fitkit.arguments import describe
from fitkit.callbacks import CallbackList
from fitkit.extras.lightning_base import ServedModel, refusal
from fitkit.extras.lightning_data import (
    DataModule,
    are_loaders,
    is_data_module,
    only_loader,
    prepare,
    training_data,
    validation_data,
)
from fitkit.extras.lightning_files import loaded_by_hook, resume_callbacks, saved_by_hook
from fitkit.extras.lightning_hooks import PACKAGES, Hooks, defines
from fitkit.extras.lightning_services import attach
from fitkit.extras.lightning_trainer import Trainer, Word
from fitkit.extras.lightning_updates import HookedScheduler, Idle, OfAll
from fitkit.extras.lightning_watcher import EpochEnd, OthersModes, hooks_updates, watcher_for
from fitkit.modes import set_flags
from fitkit.seams.callbacks import report_error
from fitkit.seams.files import OpenWeights, Scope
from fitkit.seams.networks import OpenedData, attributes_restorer
from fitkit.seams.steps import NetAlone, loss_in

STEPS = ("training", "validation", "test", "predict")

LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""Where a module may have the data of a stage."""

ITS_OWN = iter(())
"""Stands for the module's own data until its hooks have run."""

ZERO_GRAD = ("on_validation_model_zero_grad", "optimizer_zero_grad")
"""Hooks that may leave gradients for the time after a validation, which Lightning drops then."""

SET_UP = (
    "data", "evaluated_flags", "left_flags", "evaluated", "lent", "hooks", "trainer",
    "hooked_updates", "loader", "has_resumed", "_run",
    "configure_optimizers", "transfer_batch_to_device", "validation_epoch_end", "test_epoch_end",
    *(f"{stage}_step" for stage in STEPS),
)  # fmt: skip
"""What `_set_up` gives a model, and a copy makes again."""


Flags = list[tuple[torch.nn.Module, bool]]
"""Modules with their training flags."""


class LightningModel(ServedModel):
    """A model of a `LightningModule`, which says itself how it is trained.

    Args:
        net: the module.

    Attributes:
        data: the data module that the verb was given; None for other data.
        evaluated_flags: the modes that the module's own hook has set for the running evaluation.
    """

    data: DataModule | None
    evaluated_flags: Flags
    _counts_left_out = True
    _stopped_by = frozenset({"stop_training", "should_stop"})

    def __init__(self, net: Any = None) -> None:
        super().__init__(net)
        vars(self).update(call={}, written=set())
        self._set_up()

    @property
    def _acting(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.hooks.beside

    def _set_up(self) -> None:
        """Serve the module, and have the hooks that its class overrides."""
        own, module = vars(self), self.net
        hooks = Hooks(module)
        own.update(hooks=hooks, trainer=Trainer(self), hooked_updates=None, loader=None)
        own.update(data=None, evaluated_flags=[], left_flags=[], evaluated=set(), lent=set())
        own.update(has_resumed=False)
        own["_run"] = lambda: None
        attach(module, self.trainer)
        self._bind()

    def _bring(self) -> list[Any]:
        """Call the callbacks that the module brings, too; return those that can't be."""
        configured = list(trees.leaves(self.hooks.ask("configure_callbacks")))
        own = [one for one in configured if is_of_module(one)]
        self.hooks.bring(own)
        self._bind()
        return [one for one in configured if not is_of_module(one)]

    def _bind(self) -> None:
        """Have the hooks that something overrides."""
        own, hooks = vars(self), self.hooks
        for stage in STEPS:
            if hooks.has(f"{stage}_step"):
                own[f"{stage}_step"] = Bound(self, f"_{stage}_step")
        for stage in ("validation", "test"):
            # Without a test_step, evaluate validates.
            is_asked = stage == "validation" or hooks.has("test_step")
            if is_asked and hooks.has(f"on_{stage}_epoch_end"):
                own[f"{stage}_epoch_end"] = Bound(self, "_epoch_end", stage)
        if hooks.has("configure_optimizers"):
            own["configure_optimizers"] = Bound(self, "_configured")
        if hooks.moves:
            own["transfer_batch_to_device"] = Bound(self, "_moved")

    # ------------------------------------------------------------------ copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"call": _settings(self.call), "written": set(self.written)}
        own["brings"] = bool(self.hooks.beside)
        state = {**super().__getstate__(), **own}
        return {name: value for name, value in state.items() if name not in SET_UP}

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        return self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        brings = state.pop("brings", False)
        super().__setstate__(state)
        self._set_up()
        if brings:  # on another rank, whose module has its own
            self._bring()

    def __copy__(self) -> LightningModel:
        made: Any = super().__copy__()
        made._set_up()
        return made

    # ------------------------------------------------------------------ the module's own

    @property
    def automatic_optimization(self) -> bool:
        """Whether `fit` makes the updates, as the module says."""
        return bool(self.net.automatic_optimization)

    @automatic_optimization.setter
    def automatic_optimization(self, value: bool) -> None:
        self.net.automatic_optimization = value

    @property
    def hparams(self) -> Any:  # type: ignore[override]
        """The module's hyperparameters."""
        return self.net.hparams

    @property
    def validates(self) -> bool:
        """Whether `fit` validates, if it has data for that."""
        return self.hooks.has("validation_step") or not self.hooks.has("training_step")

    # ------------------------------------------------------------------ the verbs

    def fit(self, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        """As `Model.fit`. Without data, those of the module's `train_dataloader`."""
        self._check()
        with self._verb("fit", {"x": x, "y": y, **arguments}) as given:
            if given["x"] is None:
                given["x"] = self._loader("fit")
            elif given["y"] is None and are_loaders(given["x"]):
                given["x"] = training_data(given["x"])
            if are_loaders(given.get("validation_data")):
                given["validation_data"] = validation_data(given["validation_data"])
            self._validate_on(given)
            return super().fit(**self._noted("fit", given))

    def _validate_on(self, given: dict[str, Any]) -> None:
        """Give `fit` the module's own data to validate on, if it got none."""
        holds_out = given.get("validation_split") or given.get("validation_data") is not None
        has_set = self.data is not None and defines(self.data.module, "val_dataloader")
        if self.validates and not (holds_out or has_set):
            given["validation_data"] = self._loader("validate")
        elif holds_out and not self.validates:
            raise refusal(
                f"fit was given validation data, but {self.hooks.kind.__name__} has no "
                "validation_step. Define it, or leave the data out."
            )

    def evaluate(self, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        """As `Model.evaluate`: by the module's test hooks, or its validation hooks without them.

        Without data, those of its `test_dataloader` or `val_dataloader`.
        """
        stage = "test" if self.hooks.has("test_step") else "validate"
        with self._verb(stage, {"x": x, "y": y, **arguments}) as given:
            given["x"] = self._one_loader(stage, given["x"])
            return super().evaluate(**self._noted(stage, given))

    def predict(self, x: Any = None, **arguments: Any) -> Any:
        """As `Model.predict`. Without data, those of the module's `predict_dataloader`."""
        with self._verb("predict", {"x": x, **arguments}) as given:
            given["x"] = self._one_loader("predict", given["x"])
            return super().predict(**self._noted("predict", given))

    def predict_batches(self, x: Any = None, **arguments: Any) -> Any:
        """As `Model.predict_batches`. Without data, those of the module's `predict_dataloader`."""
        for one in trees.leaves(arguments.get("callbacks")):
            refuse_callback(one, "callbacks has")
        return super().predict_batches(ITS_OWN if x is None else x, **arguments)

    def _stream(self, verb: str, arguments: Any, receiver: Any) -> Any:
        """As `Model._stream`: `predict_batches` is surrounded here, where its batches are read."""
        if verb != "predict_batches":
            return super()._stream(verb, arguments, receiver)
        x = None if arguments.x is ITS_OWN else arguments.x
        with self._verb("predict", {"x": x, "callbacks": arguments.callbacks}) as given:
            given["x"] = self._one_loader("predict", given["x"])
            noted = self._noted("predict", given)
            return super()._stream(verb, dataclasses.replace(arguments, **noted), receiver)

    @contextlib.contextmanager
    def _verb(self, stage: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Surround a verb: by the hooks before its data are needed, and the one after its end.

        Yields:
            What the verb was given, to be completed.
        """
        outer, outer_data, state = dict(self.call), self.data, self.trainer.state
        before = state.fn, state.stage, state.status
        hooks, is_nested = self.hooks, self._fitkit.fit_state.run is not None
        brought, outer_run = hooks.beside, vars(self)["_run"]
        attach(self.net, self.trainer)
        vars(self).update(left_flags=[], lent=set(), has_resumed=False)
        self.resumed = None  # whatever became of the last fit
        if stage == "fit" and not is_nested:
            self.stop_training = False
        try:
            self.data = self._data_module(stage, given["x"])
            self._note(given)
            self.trainer.enter(stage, "train" if stage == "fit" else stage)
            configured = self._bring()
            if self.data is not None:
                self.data.prepare()
            if hooks.has("prepare_data"):
                prepare(self, self.net, partial(hooks.call, "prepare_data"))
            if self.data is not None:
                self.data.set_up()
            hooks.ask("setup", Word(stage))
            hooks.ask("configure_sharded_model")  # its name before
            hooks.ask("configure_model")
            yield {**given, "callbacks": [configured, given.get("callbacks")]}
            if stage != "fit" or any(part.training for part in self.net.modules()):
                set_flags(self.left_flags)  # but of a net that was in evaluation mode
            hooks.ask("teardown", Word(stage))
        except BaseException as error:
            if not is_nested:
                told = [self.on_exception]
                if self.data is not None:
                    told.append(self.data.follower.on_exception)
                report_error(error, told)
            raise
        finally:
            vars(self)["_run"] = outer_run  # an error's traceback may keep the one of this verb
            if is_nested or stage != "fit":  # those of the fit go into files
                hooks.bring(brought)
            if is_nested:
                self.data = outer_data
                self._note(outer)
                state.fn, state.stage, state.status = before
            else:  # the data may go
                self._note(_settings(self.call))
                self.trainer.leave()

    def _noted(self, stage: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return a verb's arguments, complete, and note them for the trainer.

        Raises:
            ConfigurationError: a callback is Lightning's.
        """
        configured, callbacks = given["callbacks"]
        for one in trees.leaves(configured):
            refuse_callback(one, "configure_callbacks returned")
        for one in trees.leaves(callbacks):
            refuse_callback(one, "callbacks has")
        self._note({name: value for name, value in given.items() if name != "callbacks"})
        own: list[Any] = [watcher_for(self, stage)]
        if stage == "fit":
            own.append(EpochEnd())
        users = CallbackList([configured, callbacks]).callbacks
        last = [OthersModes()] if stage == "fit" and users else []
        return {**given, "callbacks": [*own, *users, *last]}

    def _note(self, given: dict[str, Any]) -> None:
        """Note what the verb was given, for the trainer."""
        module = None if self.data is None else self.data.module
        vars(self)["call"] = {**given, "datamodule": module}

    def _check(self) -> None:
        """Refuse what doesn't go together.

        Raises:
            ConfigurationError: with what to write instead.
        """
        given, kind = self._fitkit.compilation.given, self.hooks.kind.__name__
        strategy = self._fitkit.compilation.strategy
        if self.hooks.has("training_step"):
            for name in ("loss", "metrics", "weighted_metrics"):
                if getattr(given, name):
                    raise refusal(
                        f"compile was given {name}, but {kind} has a training_step, which computes "
                        f"its own. Leave out {name}, or train the network inside the module: "
                        "fitkit.Model(module.net)."
                    )
        for name in ("learning_rate", "layer_decay", "lr_scheduler"):
            if self._configures_optimizers and getattr(given, name) is not None:
                raise refusal(
                    f"compile was given {name}, but {kind} makes its optimizers in "
                    "configure_optimizers. Set it there, or give compile the optimizer too."
                )
        if strategy.replicates:
            raise refusal(
                f"strategy={strategy.name!r} has replicas of a module in one process, which would "
                f"each call the hooks of {kind}. Write strategy='ddp'."
            )

    def _data_module(self, stage: str, x: Any) -> DataModule | None:
        """Return a data module that the verb was given; None for other data."""
        if not is_data_module(x):
            return None
        verb = {"validate": "evaluate", "test": "evaluate"}.get(stage, stage)
        return DataModule(self, x, verb, validates=stage == "validate")

    def opened_data(self, arguments: Any) -> OpenedData:
        """Return the loaders of the verb's data module, which is set up."""
        assert self.data is not None
        found = self.data.opened(arguments, validates=self.validates)
        self.call["x"] = found.x
        if found.validation_data is not None:
            self.call["validation_data"] = found.validation_data
        return found

    def _one_loader(self, stage: str, x: Any) -> Any:
        """Return what evaluate or predict reads: what it was given, or the module's own data."""
        if x is None:
            return self._loader(stage)
        verb = "predict" if stage == "predict" else "evaluate"
        return only_loader(x, verb, "") if are_loaders(x) else x

    def _loader(self, stage: str) -> Any:
        """Return the module's own data for a stage; None if it has none."""
        name = LOADERS[stage]
        if not self.hooks.has(name):
            return None
        is_evaluated = self.trainer.state.fn != "fit"
        with torch.no_grad() if is_evaluated else contextlib.nullcontext():
            found = self.hooks.call(name)
        if stage == "fit":
            return training_data(found)
        if stage == "validate" and self.trainer.state.fn == "fit":
            return validation_data(found)
        if isinstance(found, (list, tuple, dict)):
            if len(found) == 1 and not isinstance(found, dict):
                return found[0]
            raise refusal(
                f"{self.hooks.kind.__name__}.{name} returned several loaders, and this verb reads "
                "one. Give it one after the other."
            )
        return found

    # ------------------------------------------------------------------ hooks that the core calls

    def _training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        outputs = self.hooks.step("training_step", batch, batch_idx)
        if self.automatic_optimization:
            loss = loss_in(outputs)
            if loss is not None and self._is_idle_on_ranks:
                loss = OfAll.apply(loss, *(one for one in self.parameters() if one.requires_grad))
            if self.hooked_updates is not None:
                self.hooked_updates.before_backward(loss)
            return outputs if loss is None else loss
        return self._loss_alone(outputs)

    def _validation_step(self, batch: Any, batch_idx: int = 0) -> Any:
        step = self.hooks.step("validation_step", batch, batch_idx, self.loader or 0)
        return self._loss_alone(step)

    def _test_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return self._loss_alone(self.hooks.step("test_step", batch, batch_idx, self.loader or 0))

    def _predict_step(self, batch: Any, batch_idx: int = 0) -> Any:
        outputs = self.hooks.step("predict_step", batch, batch_idx)
        if self.trainer.predicting:  # before outputs are collected: the hook may change them
            hooks = self.hooks
            hooks.at_batch("on_predict_batch_end", outputs, batch, batch_idx, loader=self.loader)
        return outputs

    @property
    def _is_idle_on_ranks(self) -> bool:
        """Whether several ranks train without an optimizer."""
        ranks = self._fitkit.compilation.strategy.collectives
        made = self._fitkit.fit_state.optimizers
        return ranks.world_size > 1 and any(type(optimizer) is Idle for optimizer in made)

    @staticmethod
    def _loss_alone(outputs: Any) -> Any:
        """Return the loss among a step's outputs, which are the module's own business."""
        loss = loss_in(outputs)
        return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

    def _epoch_end(self, stage: str, outputs: list[Any]) -> None:
        if stage == "test" or self.trainer.state.fn != "fit" or self._is_last_set():
            self.hooks.call(f"on_{stage}_epoch_end")

    def _is_last_set(self) -> bool:
        return self.loader is None or self.loader == len(self.validation_sets) - 1

    def _moved(self, batch: Any, device: torch.device) -> Any:
        return self.hooks.moved(self, batch)

    # ------------------------------------------------------------------ modes

    def _to_evaluation(self, modules: Any = None) -> None:
        context: Any = self._fitkit.contexts.current
        is_within_fit = self._fitkit.fit_state.run is not None and context.name == "validation"
        stage = context.name
        if stage == "test" and not self.hooks.has("test_step"):
            stage = "validation"
        is_first = not is_within_fit or self._is_first_set()
        if is_within_fit:
            self.trainer.enter("fit", "validate")
            if (is_first and self.hooks.has(*ZERO_GRAD)) or not self.automatic_optimization:
                self.hooks.call("on_validation_model_zero_grad")
        if not self.hooks.has(f"on_{stage}_model_eval"):
            super()._to_evaluation(modules)
            return
        if is_first:
            with torch.no_grad():
                self.hooks.call(f"on_{stage}_model_eval")
            self.training = self.net.training
            vars(self)["evaluated_flags"] = [(part, part.training) for part in self.modules()]
        else:
            set_flags(self.evaluated_flags)

    def _is_first_set(self) -> bool:
        name = self.run.history.params["validation_set"]
        return name == next(iter(self.run.held_out))

    @contextlib.contextmanager
    def _around_validation(self) -> Iterator[None]:
        with super()._around_validation():
            yield
            flags = [(part, part.training) for part in self.net.modules()]
        if not self._is_last_set():
            return
        if self.hooks.has("on_validation_model_train"):  # it has said how the training goes on
            set_flags(flags)
            self.run.in_evaluation = [part for part, flag in flags if not flag]
        if self.hooked_updates is not None:
            self.hooked_updates.after_validation()

    # ------------------------------------------------------------------ optimizers

    def _configured(self) -> Any:
        """Return what the module's `configure_optimizers` does, as fitkit reads it."""
        returned = self.hooks.call("configure_optimizers")
        if returned is None:
            return Idle(self.parameters())
        several = returned if isinstance(returned, (list, tuple)) else ()
        if several and isinstance(several[0], (list, tuple)):
            optimizers, schedulers = several[0], several[1] if len(several) > 1 else []
            schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
            returned = list(optimizers), [_by_epoch(one) for one in schedulers if one is not None]
        elif isinstance(returned, dict):
            returned = _with_interval(returned)
        elif several and all(isinstance(one, dict) for one in several):
            returned = [_with_interval(one) for one in several]
        return returned

    def _made_optimizers(self) -> list[Optimizer]:
        before = self._fitkit.fit_state.optimizers
        made = super()._made_optimizers()
        state = self._fitkit.fit_state
        if len(made) > 1 and self.automatic_optimization:
            raise refusal(
                f"{self.hooks.kind.__name__}.configure_optimizers returned {len(made)} optimizers. "
                "Several take turns with automatic_optimization = False, set in __init__: call "
                "their step in training_step."
            )
        if self._configures_optimizers and before is not made and hooks_updates(self):
            state.schedulers = [
                plan if isinstance(plan, HookedScheduler) else HookedScheduler.of(plan)
                for plan in state.schedulers
            ]
        return made

    # ------------------------------------------------------------------ files

    def _saved(self, weights: Any) -> tuple[Any, dict[str, Any]]:
        return saved_by_hook(self, weights)

    def _loaded(self, weights: OpenWeights, beside: Any, undo: Scope) -> OpenWeights:
        return loaded_by_hook(self, weights, beside, undo)

    def _weights_fit(self, weights: Any, progress: Any, undo: Scope) -> None:
        """Resume the data module and the brought callbacks, in Lightning's order: behind the
        weights, and before the optimizers are made.
        """
        if not self.trainer.is_running("fit") or self.run is not None:
            return
        data = None if self.data is None or progress is None else self.data
        if self.resumed is not None:
            undo.callback(weights.restorer())
            undo.callback(attributes_restorer(self.hooks.beside))
            weights.assign()
        if data is not None:
            undo.callback(attributes_restorer([data.module]))
            data.follower.restore(progress.callbacks)
        if self.resumed is not None:
            resume_callbacks(self)
            vars(self)["has_resumed"] = True

    @property
    def _loads_strictly(self) -> bool:
        return bool(getattr(self.net, "strict_loading", True))

    # ------------------------------------------------------------------ the begin of a fit

    def _fit_begins(self, run: Any) -> None:
        vars(self)["_run"] = weakref.ref(run)
        attach(self.net, self.trainer)
        if self.resumed is not None and not self.has_resumed:  # on another rank
            resume_callbacks(self)
        self.resumed = None
        self._made_optimizers()  # with the schedulers, which may decide about compiling
        vars(self)["stops_early"] = bool(self.stop_training)
        compiler = self._fitkit.compiler
        if hooks_updates(self) and compiler is not None and not isinstance(compiler, NetAlone):
            self._fitkit.compiler = NetAlone(compiler)


class Bound:
    """A method of a model, for the model's own attributes: it doesn't keep the model alive.

    Args:
        model: the model.
        name: the method's name.
        *first: its first arguments.
    """

    def __init__(self, model: LightningModel, name: str, *first: Any) -> None:
        self._model, self._name, self._first = weakref.ref(model), name, first

    def __call__(self, *arguments: Any) -> Any:
        return getattr(self._model(), self._name)(*self._first, *arguments)


def _settings(call: dict[str, Any]) -> dict[str, Any]:
    """Return what a verb was given, without data."""
    return {name: one for name, one in call.items() if isinstance(one, (int, float, str))}


def _with_interval(entry: dict[str, Any]) -> dict[str, Any]:
    scheduler = entry.get("lr_scheduler")
    return entry if scheduler is None else {**entry, "lr_scheduler": _by_epoch(scheduler)}


def _by_epoch(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler with its interval: by Lightning's default, the epoch."""
    given = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
    return {"interval": "epoch", **given}


KINDS = {"Callback": "callback", "Logger": "logger"}

BY_HOOKS = {"Callback", "BaseFinetuning", "LambdaCallback", "Timer"}
"""Lightning's callbacks that do all by their hooks, so that what is derived from them is called.
Others, such as `ModelCheckpoint`, rely on the Trainer's loops."""


def lightnings_kinds(callback: Any) -> list[type]:
    """Return the classes of a callback or logger that Lightning has, the nearest first."""
    return [
        kind
        for kind in type(callback).__mro__
        if kind.__module__.partition(".")[0] in PACKAGES
        and any(base.__name__ in KINDS for base in kind.__mro__)
    ]


def is_of_module(callback: Any) -> bool:
    """Whether something is a callback of Lightning's kind whose hooks can be called: not one that
    Lightning has, or that is derived from one which relies on the Trainer.
    """
    kinds = lightnings_kinds(callback)
    own = bool(kinds) and kinds[0] is not type(callback)
    return own and all(kind.__name__ in BY_HOOKS for kind in kinds)


def refuse_callback(callback: Any, where: str) -> None:
    """Refuse a callback or logger of Lightning's.

    Raises:
        ConfigurationError: with ours of the same name, if there is one.
    """
    kinds = lightnings_kinds(callback)
    if not kinds:
        return
    what = next(KINDS[kind.__name__] for kind in kinds if kind.__name__ in KINDS)
    named = [kind.__name__ for kind in kinds if kind.__name__ not in KINDS]
    ours = next((name for name in named if hasattr(getattr(fitkit, f"{what}s"), name)), None)
    advice = (
        f"Use fitkit.{what}s.{ours}."
        if ours
        else f"Write a fitkit.{what}s.{what.title()} with the same methods."
    )
    is_own = kinds[0] is not type(callback)
    origin = (
        f"derived from Lightning's {kinds[0].__name__}" if is_own else f"a {what} of Lightning's"
    )
    raise refusal(f"{where} {describe(callback)}, {origin}. {advice}")
