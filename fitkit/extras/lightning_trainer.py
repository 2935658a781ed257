"""What a `LightningModule` sees as `self.trainer`: where the training stands, and its settings."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch

from fitkit.errors import with_code
from fitkit.extras.lightning_base import ServedModel, Unknown
from fitkit.extras.lightning_loggers import ModuleLogger
from fitkit.extras.lightning_loops import FitLoop
from fitkit.extras.lightning_objects import SchedulerConfig


class Word(str):
    """A name that also equals an enum's member of that value, as Lightning's own do."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return str(self) == getattr(other, "value", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))

    def __getattr__(self, name: str) -> Any:
        message = (
            f"fitkit trains this module, and its trainer's state is {str(self)!r}, which has no "
            f"{name!r}. Compare it, or read its value."
        )
        raise AttributeError(message if name.startswith("_") else with_code(message, "FK084"))


class State(Unknown):
    """Which verb runs, and which part of it.

    Attributes:
        fn: `"fit"`, `"validate"`, `"test"`, `"predict"`, or None.
        stage: `"train"`, `"validate"`, `"test"`, `"predict"`, or None.
        status: `"initializing"`, `"running"`, `"finished"` or `"interrupted"`.
    """

    KNOWN_AS = "trainer.state"

    def __init__(self) -> None:
        self.fn: Word | None = None
        self.stage: Word | None = None
        self.status: Word = Word("initializing")

    @property
    def finished(self) -> bool:
        """Whether the last verb is over."""
        return self.status == "finished"


class Strategy(Unknown):
    """What a module may ask of the way in which it is distributed."""

    KNOWN_AS = "trainer.strategy"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    @property
    def _model(self) -> ServedModel:
        trainer = self._trainer()
        assert trainer is not None
        return trainer.model_now

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._model.device

    @property
    def strategy_name(self) -> str:
        """The name that `compile` takes."""
        name: str = self._model._fitkit.compilation.strategy.name
        return name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._model.world_size

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self._model.global_rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return self._model.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._model.is_global_zero

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._model._fitkit.compilation.strategy.collectives.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a rank's object on all ranks."""
        return self._model._fitkit.compilation.strategy.collectives.gather(obj)[src]

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all ranks."""
        module: Any = self._model.net
        return module.all_gather(tensor, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or one of them."""
        found = self._model._fitkit.compilation.strategy.collectives.gather(bool(decision))
        return min(found) if all else max(found)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or the sum, of a tensor over the ranks."""
        ranks = self._model._fitkit.compilation.strategy.collectives
        if ranks.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        rows = ranks.join_rows(tensor.unsqueeze(0))
        return rows.sum(0) if str(reduce_op).lower().endswith("sum") else rows.mean(0)


STAYS = (
    "current_epoch", "global_step", "is_last_batch", "max_epochs", "should_stop", "world_size",
    "num_nodes", "num_devices", "device_ids", "global_rank", "local_rank", "node_rank",
    "is_global_zero", "precision", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm",
)  # fmt: skip
"""What a trainer still answers when its model is gone, as the last verb left it."""


class GoneError(AttributeError):
    """The model of a module is gone, so what was asked of the trainer isn't known."""


class Trainer(Unknown):
    """The trainer of a module that a fitkit model trains.

    What it has is true while a verb runs. Settings are those of `compile` and of the verb.
    A module that outlives its model asks it, too, perhaps in its forward: then it has what stays.

    Args:
        model: the model.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model_ref = weakref.ref(model)
        self.state: State = State()
        self.strategy: Strategy = Strategy(self)
        self.values: dict[str, Any] = {}
        self.began: dict[str, Any] = {}  # the values at the epoch's begin
        self.resumed: dict[str, Any] = {}  # those when it was interrupted
        self.held: list[Callable[[], None]] = []
        self.epochs_over: int = 0  # 1 when the last epoch is over, if there was one
        self._views: dict[int, ModuleLogger] = {}
        self._left: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Answer what isn't there, or what was there while the model was."""
        if name == "model_now":  # it isn't: then this is asked for what needs it
            raise GoneError("The fitkit.Model of this module is gone.")
        left = vars(self).get("_left", {})
        if name in left:
            return left[name]
        if hasattr(type(self), name) and self.fitkit_model is None:
            raise RuntimeError(
                f"The fitkit.Model of this module is gone, and its trainer.{name} with it. Make a "
                "new one of the module."
            )
        return super().__getattr__(name)

    OURS = frozenset({
        "began", "enter", "enter_interrupted", "epochs_over", "fitkit_model", "held", "is_running",
        "leave", "log_held", "model_now", "note", "resumed", "showing", "values",
    })  # fmt: skip
    INSTEAD: ClassVar[dict[str, str]] = {
        "fit": "call fit of the fitkit.Model",
        "validate": "call evaluate of the fitkit.Model",
        "test": "call evaluate of the fitkit.Model",
        "predict": "call predict of the fitkit.Model",
        "precision_plugin": "read self.trainer.precision",
        "accelerator": "read self.device",
        "optimizer_frequencies": "count the batches in training_step",
        "validate_loop": "read self.trainer.fit_loop.epoch_loop.val_loop",
        "test_loop": "count the batches in test_step",
        "predict_loop": "count the batches in predict_step",
    }

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies of what refers to it None."""
        return type(None), ()

    @property
    def fitkit_model(self) -> ServedModel | None:
        """The model; None when it is gone."""
        return self._model_ref()

    @property
    def model_now(self) -> ServedModel:
        """The model, which must be there."""
        model = self._model_ref()
        if model is None:
            raise GoneError("The fitkit.Model of this module is gone.")
        return model

    # ------------------------------------------------------------------ what runs

    def enter(self, fn: str, stage: str) -> None:
        """Note which verb runs, and which part of it."""
        self.state.fn, self.state.stage = Word(fn), Word(stage)
        self.state.status = Word("running")

    def enter_interrupted(self) -> None:
        """Note that an error ends the verb."""
        self.state.status = Word("interrupted")

    def leave(self) -> None:
        """Note that the verb is over, and what stays of it."""
        self._left = {name: getattr(self, name) for name in STAYS}
        self.state.stage = None
        if not self.interrupted:
            self.state.status = Word("finished")

    def is_running(self, fn: str) -> bool:
        """Whether a verb runs, by Lightning's name."""
        return self.state.fn == fn and self.state.status == "running"

    @property
    def interrupted(self) -> bool:
        """Whether an error has ended the verb."""
        return self.state.status == "interrupted"

    @property
    def training(self) -> bool:
        """Whether training batches are computed."""
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation batches are computed."""
        return self.state.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether `evaluate` runs test steps."""
        return self.state.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` runs."""
        return self.state.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether validation or test batches are computed."""
        return self.validating or self.testing

    sanity_checking = False
    fast_dev_run = False
    barebones = False
    overfit_batches: float = 0.0
    log_every_n_steps = 50
    min_epochs = None
    min_steps = None
    profiler = None
    reload_dataloaders_every_n_epochs = 0
    num_sanity_val_steps = 0
    progress_bar_callback = None

    # ------------------------------------------------------------------ how far

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, from 0; after a training, that of the next."""
        return self.model_now.current_epoch + self.epochs_over

    @property
    def global_step(self) -> int:
        """The number of updates. One that `optimizer_step` makes counts when that returns."""
        model = self.model_now
        before: int | None = model.updates_before
        return model.global_step if before is None else before

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch is its epoch's last."""
        return self.model_now.is_last_batch

    @property
    def max_epochs(self) -> int | None:
        """The `epochs` of `fit`."""
        found: int | None = self.model_now.call.get("epochs", 1)
        return found

    @property
    def max_steps(self) -> int:
        """-1: `fit` counts epochs."""
        return -1

    @property
    def should_stop(self) -> bool:
        """Whether the training ends after this epoch; to be set."""
        return bool(self.model_now.stop_training)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.model_now.stop_training = bool(value)

    @property
    def num_training_batches(self) -> float:
        """The batches of an epoch on this rank; infinite if unknown."""
        steps = self.model_now.batches_of_epoch
        return math.inf if steps is None else steps

    @property
    def estimated_stepping_batches(self) -> float:
        """The updates of the whole training; infinite if unknown."""
        batches, epochs = self.num_training_batches, self.max_epochs or 1
        if batches == math.inf:
            return math.inf
        return math.ceil(batches / self.accumulate_grad_batches) * epochs

    @property
    def num_val_batches(self) -> list[float]:
        """The batches of each validation set on this rank, in `fit` and in `evaluate`."""
        if self.state.fn == "validate":
            return self._batches_read_by("validate")
        run: Any = self.model_now.run
        held_out = {} if run is None else run.held_out
        return [math.inf if one.steps is None else one.steps for one in held_out.values()]

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """No batches of each validation set: `fit` begins without a look at them."""
        return [0 for _ in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[float]:
        """The batches that `evaluate` reads on this rank, if it runs test steps."""
        return self._batches_read_by("test")

    @property
    def num_predict_batches(self) -> list[float]:
        """The batches that `predict` reads on this rank."""
        return self._batches_read_by("predict")

    def _batches_read_by(self, verb: str) -> list[float]:
        """Return how many batches a verb reads; none if another one runs."""
        if self.state.fn != verb:
            return []
        batches = self.model_now.batches_read
        return [math.inf if batches is None else batches]

    # ------------------------------------------------------------------ settings

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.model_now.world_size

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        given = self.model_now._fitkit.compilation.given.num_nodes
        return given if isinstance(given, int) else 1

    @property
    def num_devices(self) -> int:
        """The devices of a node."""
        return max(1, self.world_size // self.num_nodes)

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices."""
        return self.model_now.device_ids

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self.model_now.global_rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return self.model_now.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self.global_rank // self.num_devices

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.model_now.is_global_zero

    @property
    def precision(self) -> str:
        """The precision's name."""
        name: str = self.model_now._fitkit.compilation.strategy.precision.name
        return name

    @property
    def accumulate_grad_batches(self) -> int:
        """The batches of an update."""
        state, given = self.model_now._fitkit.fit_state, self.model_now._fitkit.compilation.given
        running = state.run is not None
        found: int = state.accumulate if running else given.accumulate_grad_batches
        return found

    @property
    def gradient_clip_val(self) -> float | None:
        """As `compile` was told."""
        found: float | None = self.model_now._fitkit.compilation.given.gradient_clip_val
        return found

    @property
    def gradient_clip_algorithm(self) -> str:
        """As `compile` was told."""
        found: str = self.model_now._fitkit.compilation.given.gradient_clip_algorithm
        return found

    @property
    def limit_train_batches(self) -> float:
        """`steps_per_epoch`, or 1.0 for all."""
        return self.model_now.call.get("steps_per_epoch") or 1.0

    @property
    def limit_val_batches(self) -> float:
        """`validation_steps`, or 1.0 for all."""
        return self.model_now.call.get("validation_steps") or 1.0

    @property
    def limit_test_batches(self) -> float:
        """`steps` of `evaluate`, or 1.0 for all."""
        return self.model_now.call.get("steps") or 1.0

    limit_predict_batches = limit_test_batches

    @property
    def val_check_interval(self) -> float:
        """The part of an epoch after which `fit` validates."""
        every = self.model_now.call.get("validation_freq", 1)
        return every if isinstance(every, float) else 1.0

    @property
    def check_val_every_n_epoch(self) -> int:
        """The epochs after which `fit` validates."""
        every = self.model_now.call.get("validation_freq", 1)
        return every if isinstance(every, int) else 1

    @property
    def default_root_dir(self) -> str:
        """The working directory."""
        return os.getcwd()

    @property
    def log_dir(self) -> str:
        """The folder of the first logger that has one, or the working directory."""
        found = next((one.log_dir for one in self.loggers if hasattr(one, "log_dir")), os.getcwd())
        return os.fspath(found)

    @property
    def ckpt_path(self) -> Any:
        """What `fit` resumes from."""
        return self.model_now.call.get("resume_from")

    # ------------------------------------------------------------------ objects

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self.model_now.net

    model = lightning_module

    @property
    def datamodule(self) -> Any:
        """The data module that the verb was given; None for other data."""
        return self.model_now.call.get("datamodule")

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers: torch's own objects."""
        return list(self.model_now._fitkit.fit_state.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers, with their intervals."""
        plans = self.model_now._fitkit.fit_state.schedulers
        return [SchedulerConfig(plan) for plan in plans]

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the running `fit`: fitkit's, and those that the module brings."""
        model = self.model_now
        own = [] if model.run is None else model.run.callbacks
        users = [one for one in own if not type(one).__module__.startswith(HERE)]
        return [*users, *model.hooks.beside]

    @property
    def loggers(self) -> list[Any]:
        """The callbacks that are fitkit's loggers, with Lightning's methods."""
        own = [one for one in self.callbacks if hasattr(one, "log_scalars")]
        views = {id(one): ModuleLogger(one, self.model_now) for one in own}
        self._views = {key: self._views.get(key, view) for key, view in views.items()}
        return list(self._views.values())

    def log_held(self) -> None:
        """Give the loggers what was logged before they were open."""
        held, self.held = self.held, []
        for log in held:
            log()

    @property
    def logger(self) -> Any:
        """The first of the loggers; None if there is none."""
        return next(iter(self.loggers), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that are a `ModelCheckpoint`."""
        return [one for one in self.callbacks if hasattr(one, "best_model_path")]

    @property
    def checkpoint_callback(self) -> Any:
        """The first of them; None if there is none."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that are an `EarlyStopping`."""
        return [one for one in self.callbacks if hasattr(one, "stopped_epoch")]

    @property
    def early_stopping_callback(self) -> Any:
        """The first of them; None if there is none."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def train_dataloader(self) -> Any:
        """What `fit` trains on, as it was given; of a worker, its copy. None in other verbs."""
        if self.state.fn != "fit":
            return None
        run = self.model_now.run
        return self.model_now.call.get("x", None if run is None else _loader_of(run.data.source))

    @property
    def val_dataloaders(self) -> Any:
        """What is validated on, as it was given; several in a list."""
        if self.state.fn != "fit":
            return self._read_by("validate")
        run, given = self.model_now.run, self.model_now.call.get("validation_data")
        if given is None and run is not None:
            held_out = [_loader_of(one) for one in run.held_out.values()]
            given = held_out[0] if len(held_out) == 1 else held_out
        return list(given.values()) if isinstance(given, dict) else given

    @property
    def test_dataloaders(self) -> Any:
        """What `evaluate` reads, as it was given, if it runs test steps."""
        return self._read_by("test")

    @property
    def predict_dataloaders(self) -> Any:
        """What `predict` reads, as it was given."""
        return self._read_by("predict")

    def _read_by(self, verb: str) -> Any:
        """Return what a verb reads; None if another one runs."""
        return self.model_now.call.get("x") if self.state.fn == verb else None

    @property
    def fit_loop(self) -> FitLoop:
        """What modules ask of the loop over epochs."""
        return FitLoop(self.model_now)

    @property
    def enable_validation(self) -> bool:
        """Whether the running `fit` validates."""
        has_data = self.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        return has_data and self.model_now.hooks.has("validation_step")

    # ------------------------------------------------------------------ values

    def note(self, logs: Mapping[str, Any]) -> None:
        """Note the values of an epoch or a validation."""
        self.values.update(logs)
        if self.resumed:
            self.resumed.update(logs)

    @contextlib.contextmanager
    def showing(self, values: dict[str, Any]) -> Iterator[None]:
        """Have these values alone, for the length of a block."""
        before = self.values, self.resumed
        self.values, self.resumed = values, {}
        try:
            yield
        finally:
            self.values, self.resumed = before

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The values logged so far, as tensors."""
        model = self.model_now
        run, context = model.run, cast("Any", model._fitkit.contexts.current)
        epoch = None if run is None else run.current
        of_epoch = {} if epoch is None else epoch.context.logged.results()
        found = {**self.values, **(of_epoch or self.resumed)}  # also within a validation
        if context is not None:
            found.update(context.logged.results())
        for name in [name for name in found if name.endswith("_epoch")]:
            bare, step = name.removesuffix("_epoch"), f"{name.removesuffix('_epoch')}_step"
            if step in found:  # the last step's within an epoch of training, and then the epoch's
                found.setdefault(bare, found[step if step in of_epoch else name])
        return tensors_in(found)

    logged_metrics = callback_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the progress bar shows."""
        hidden = self.model_now._fitkit.hidden_names
        return {n: float(v) for n, v in self.callback_metrics.items() if n not in hidden}

    def save_checkpoint(self, filepath: Any, weights_only: Any = None, **others: Any) -> None:
        """Save the model, as `model.save` does."""
        self.model_now.save(filepath)


def tensors_in(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the numbers among logged values, as tensors."""
    return {
        name: torch.as_tensor(value, dtype=torch.get_default_dtype())
        for name, value in values.items()
        if isinstance(value, (int, float, torch.Tensor))
    }


def _loader_of(source: Any) -> Any:
    """Return the loader that a source reads, or the source."""
    whole = getattr(source, "whole", source)
    return getattr(whole, "loader", whole)


HERE = "fitkit.extras.lightning_"
