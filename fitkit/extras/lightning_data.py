"""Lightning's data modules, as the data of `fit`, `evaluate` and `predict`.

A data module says where loaders come from: it prepares files, makes data sets, and returns a loader
for each verb. Its hooks are called here in Lightning's order, before the call reaches the ranks.
Nothing is imported from Lightning: classes are known by their names and modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from fitkit.errors import CheckpointError, ConfigurationError
from fitkit.extras.combined import CombinedLoader
from fitkit.extras.lightning_base import ServedModel
from fitkit.extras.lightning_hooks import TRANSFERS, defines, is_lightnings
from fitkit.extras.lightning_trainer import Trainer
from fitkit.seams.callbacks import Callback, Logs
from fitkit.seams.networks import Module, OpenedData, has_own_steps

LOADERS = {"fit": "train", "evaluate": "test", "predict": "predict"}
"""What begins the name of the loader that a verb reads."""

STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}
"""What `setup` and `teardown` get, by a loader's name."""


class DataModule:
    """A data module in a verb: its hooks before the ranks begin, in Lightning's order.

    Args:
        model: the model of the verb.
        module: the data module.
        verb: `"fit"`, `"evaluate"` or `"predict"`.
        validates: whether `evaluate` validates, as of a module without test hooks. Default: it
            tests, unless the data module has no loader for that.

    Attributes:
        stage: what `setup` and `teardown` get.
        follower: follows the call on each rank.

    Raises:
        ConfigurationError: the data module has no loader for the verb.
    """

    def __init__(self, model: Module, module: Any, verb: str, *, validates: bool = False) -> None:
        self.model: Module = model
        self.module: Any = module
        self.verb: str = verb
        name = LOADERS[verb]
        if verb == "evaluate" and (validates or not defines(module, "test_dataloader")):
            name = "val"
        if not defines(module, f"{name}_dataloader"):
            raise refusal(
                f"{type(module).__name__} has no {name}_dataloader, from which {verb} reads. "
                f"Define it, or give {verb} a loader."
            )
        self._loader = f"{name}_dataloader"
        self.transfer: Callable[[Any, torch.device], Any] | None = transfer_of(model, module)
        is_compiled = model._fitkit.compilation.given.jit_compile is not False
        if self.transfer is not None and is_compiled and has_own_steps(model, "training"):
            raise refusal(
                f"{type(module).__name__} moves batches itself, which jit_compile can't compile "
                "together with a training_step. Leave out one of the two."
            )
        self.stage: str = STAGES[name]
        self.follower: DataModuleState = DataModuleState(module, self.stage)
        self.follower.set_model(model)

    def prepare(self) -> None:
        """Prepare the data, in one process or in one of each node."""
        prepare(self.model, self.module, self.module.prepare_data)

    def set_up(self) -> None:
        """Make the data sets."""
        self.module.setup(self.stage)

    def opened(self, arguments: Any, *, validates: bool = True) -> OpenedData:
        """Return the loaders of the call with these arguments.

        Args:
            validates: whether `fit` validates on the data module's loaders.
        """
        module = self.module
        held_out = None
        if self.verb != "fit":
            with torch.no_grad():
                x = only_loader(getattr(module, self._loader)(), self.verb, self._loader)
        else:
            x = training_data(getattr(module, self._loader)())
            validates = validates and arguments.validation_data is None
            if validates and defines(module, "val_dataloader"):
                held_out = validation_data(module.val_dataloader())
        return OpenedData(x, held_out, self.follower, self.transfer)


def is_data_module(value: object) -> bool:
    """Whether a value is a `LightningDataModule`."""
    return is_lightnings(value, "LightningDataModule")


def opened(model: Module, verb: str, arguments: Any) -> OpenedData | None:
    """Return what a data module stands for; None for other data.

    Args:
        verb: `"fit"`, `"evaluate"` or `"predict"`.
        arguments: those of the call.

    Ranks:
        Collective where each rank runs the program. Elsewhere rank 0 calls it alone.

    Raises:
        ConfigurationError: the data module has no loader for the verb.
    """
    if not is_data_module(arguments.x):
        return None
    if isinstance(model, ServedModel):  # has called the hooks, between those of its module
        return model.opened_data(arguments)
    data = DataModule(model, arguments.x, verb)
    data.prepare()
    data.set_up()
    if getattr(arguments, "resumed", None) is not None:
        data.follower.restore(arguments.resumed.callbacks)
    return data.opened(arguments)


def prepare(model: Module, module: Any, hook: Callable[[], object]) -> None:
    """Call `prepare_data` in one process, or in one of each node, while the others wait.

    Args:
        module: a data module, or a LightningModule, which says in how many.
        hook: its `prepare_data`.
    """
    strategy = model._fitkit.compilation.strategy
    if strategy.reads_on_rank_zero and strategy.collectives.world_size == 1:
        hook()  # this process has all data, and no rank is there yet
    else:
        per_node = getattr(module, "prepare_data_per_node", True)
        model._launcher().launch("prepare_data", prepare_here, model, hook, per_node)


def prepare_here(model: Module, hook: Callable[[], object], per_node: bool) -> None:
    """Prepare the data where this rank has to; return when all ranks have come so far."""
    strategy = model._fitkit.compilation.strategy
    if (strategy.world.local_rank if per_node else strategy.world.rank) == 0:
        hook()
    strategy.collectives.gather(None)


class DataModuleState(Callback):
    """Follows a call on each rank, for a data module: its trainer, its state in files, its end.

    Args:
        module: the data module, set up.
        stage: what `teardown` gets.
    """

    stops_alike = True
    comes_last = True

    def __init__(self, module: Any, stage: str) -> None:
        self.module = module
        self.stage = stage
        self._knows_error = False

    def set_model(self, model: Module) -> None:
        super().set_model(model)
        self.module.trainer = trainer_of(model, self.module)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._end("fit")

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._end("validate", "test")

    def on_predict_end(self, logs: Logs | None = None) -> None:
        self._end("predict")

    def _end(self, *stages: str) -> None:
        # A validation within fit ends, too.
        if self.stage in stages:
            self.module.teardown(self.stage)

    def on_exception(self, error: BaseException) -> None:
        if not self._knows_error:
            self._knows_error = True
            self.module.on_exception(error)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.module.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the loaders were made by this state, which `restore` gave."""

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Give the data module its state in a file, before it makes its loaders.

        Raises:
            CheckpointError: the data module can't take it.
        """
        name = type(self).__name__
        stored = next((state for state in states if state["class"] == name), None)
        if stored is None or not stored["state"]:
            return
        try:
            self.module.load_state_dict(stored["state"])
        except Exception as error:
            raise CheckpointError(
                f"{type(self.module).__name__} can't resume from its state in the checkpoint "
                f"({type(error).__name__}: {error}). Make it as before."
            ) from error


# ---------------------------------------------------------------------- loaders


def training_data(loaders: Any) -> Any:
    """Return loaders as what `fit` trains on: several are read together, as Lightning does."""
    if is_lightnings(loaders, "CombinedLoader"):
        return CombinedLoader(loaders.iterables, loaders._mode)
    if isinstance(loaders, (list, tuple, Mapping)) and loaders:
        if isinstance(loaders, (list, tuple)) and len(loaders) == 1:
            return loaders[0]
        return CombinedLoader(loaders, "max_size_cycle")
    return loaders


def validation_data(loaders: Any) -> Any:
    """Return loaders as what `fit` validates on; None where there is none."""
    if is_lightnings(loaders, "CombinedLoader"):
        loaders = loaders.iterables
    if isinstance(loaders, Mapping):
        return dict(loaders) or None
    if not isinstance(loaders, (list, tuple)):
        return loaders
    if len(loaders) < 2:
        return loaders[0] if loaders else None
    return {f"dataloader_idx_{number}": loader for number, loader in enumerate(loaders)}


def are_loaders(value: Any) -> bool:
    """Whether a value is loaders as Lightning's Trainer takes them: combined, lists or dicts."""
    if is_lightnings(value, "CombinedLoader"):
        return True
    if not isinstance(value, (list, tuple, Mapping)) or not value:
        return False
    parts = value.values() if isinstance(value, Mapping) else value
    return all(isinstance(one, DataLoader) or are_loaders(one) for one in parts)


def only_loader(loaders: Any, verb: str, name: str) -> Any:
    """Return the loader that a verb reads.

    Args:
        name: what has returned them; empty for the caller.

    Raises:
        ConfigurationError: there are several, or none.
    """
    if is_lightnings(loaders, "CombinedLoader"):
        loaders = loaders.iterables
    if not isinstance(loaders, (list, tuple, Mapping)):
        return loaders
    if len(loaders) == 1 and not isinstance(loaders, Mapping):
        return loaders[0]
    key = repr(next(iter(loaders), 0)) if isinstance(loaders, Mapping) else "0"
    one, what = (f"datamodule.{name}()", f"{name} returned") if name else ("x", f"{verb} got")
    raise refusal(
        f"{what} {len(loaders)} loaders, but {verb} reads one a call. Call {verb} for each of "
        f"them: {verb}({one}[{key}])."
    )


# ---------------------------------------------------------------------- batches on their way


def transfer_of(model: Module, module: Any) -> Callable[[Any, torch.device], Any] | None:
    """Return how a data module moves batches; None where it has no hooks for them."""
    if not any(defines(module, name) for name in TRANSFERS):
        return None
    if isinstance(model, ServedModel):
        return partial(moved_between, model)
    return partial(moved, model, module)


def moved_between(model: ServedModel, batch: Any, device: torch.device) -> Any:
    """Move a batch by the hooks of a data module and of a LightningModule."""
    return model.hooks.moved(model, batch)


def moved(model: Module, module: Any, batch: Any, device: torch.device) -> Any:
    """Move a batch by the hooks of a data module, or of the model where it has none."""
    before, move, after = TRANSFERS
    if defines(module, before):
        batch = module.on_before_batch_transfer(batch, 0)
    if defines(module, move):
        batch = module.transfer_batch_to_device(batch, device, 0)
    else:
        batch = model.transfer_batch_to_device(batch, device)
    return module.on_after_batch_transfer(batch, 0) if defines(module, after) else batch


# ---------------------------------------------------------------------- the trainer


class Served:
    """A model without a module of Lightning's, as a trainer asks it.

    Args:
        model: the model.
        module: the data module, which has the trainer.
    """

    is_last_batch = False

    def __init__(self, model: Module, module: Any) -> None:
        self._model = model
        self.call: dict[str, Any] = {"datamodule": module}

    @property
    def run(self) -> Any:
        """The running `fit`; None without one."""
        return self._model._fitkit.fit_state.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class OwnTrainer(Trainer):
    """The trainer of a data module that a model without a module of Lightning's reads."""

    def __init__(self, model: Module, module: Any) -> None:
        served: Any = Served(model, module)
        super().__init__(served)
        self._served = served  # the base has a weak reference


def trainer_of(model: Module, module: Any) -> Any:
    """Return what a data module sees as its trainer."""
    if isinstance(model, ServedModel):
        model.call["datamodule"] = module
        return model.trainer
    return OwnTrainer(model, module)


def refusal(message: str) -> ConfigurationError:
    return ConfigurationError(message, code="FK090")
