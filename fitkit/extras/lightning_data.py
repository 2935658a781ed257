"""Lightning's data modules, as the data of `fit`, `evaluate` and `predict`.

A data module says where loaders come from: it prepares files, makes data sets, and returns a loader
for each verb. Its hooks are called here in Lightning's order, before the call reaches the ranks.
Nothing is imported from Lightning: classes are known by their names and modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fitkit.errors import CheckpointError, ConfigurationError
from fitkit.extras.combined import CombinedLoader
from fitkit.seams import Callback, Logs, Module, OpenedData, guest_of, has_own_steps

PACKAGES = ("lightning", "pytorch_lightning")

LOADERS = {"fit": "train", "evaluate": "test", "predict": "predict"}
"""What begins the name of the loader that a verb reads."""

STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}
"""What `setup` and `teardown` get, by a loader's name."""

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def is_lightnings(value: object, name: str) -> bool:
    """Whether a value is of Lightning's class of that name, in either of its packages."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in PACKAGES
        for kind in type(value).__mro__
    )


def defines(thing: Any, name: str) -> bool:
    """Whether a method of a data module, or a LightningModule, is the user's own."""
    if name in vars(thing):
        return True
    home = next((kind for kind in type(thing).__mro__ if name in vars(kind)), None)
    if home is None:
        return False
    package, _, rest = home.__module__.partition(".")
    return package not in PACKAGES or not rest.removeprefix("pytorch.").startswith("core.")


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
    module = arguments.x
    if not is_lightnings(module, "LightningDataModule"):
        return None
    name = LOADERS[verb]
    if verb == "evaluate" and not defines(module, "test_dataloader"):
        name = "val"
    if not defines(module, f"{name}_dataloader"):
        raise refusal(
            f"{type(module).__name__} has no {name}_dataloader, from which {verb} reads. Define "
            f"it, or give {verb} a loader."
        )
    transfer = transfer_of(model, module)
    is_compiled = model._fitkit.compilation.given.jit_compile is not False
    if transfer is not None and is_compiled and has_own_steps(model, "training"):
        raise refusal(
            f"{type(module).__name__} moves batches itself, which jit_compile can't compile "
            "together with a training_step. Leave out one of the two."
        )
    stage = STAGES[name]
    follower = DataModuleState(module, stage)
    module.trainer = trainer_of(model, module)
    prepare(model, module)
    module.setup(stage)
    if getattr(arguments, "resumed", None) is not None:
        follower.restore(arguments.resumed.callbacks)
    x, held_out = getattr(module, f"{name}_dataloader")(), None
    x = training_data(x) if verb == "fit" else only_loader(x, verb, f"{name}_dataloader")
    if verb == "fit" and arguments.validation_data is None and defines(module, "val_dataloader"):
        held_out = validation_data(module.val_dataloader())
    module.trainer = None  # each rank has its own
    return OpenedData(x, held_out, follower, transfer)


def prepare(model: Module, module: Any) -> None:
    """Call `prepare_data` in one process, or in one of each node, while the others wait."""
    strategy = model._fitkit.compilation.strategy
    if strategy.reads_on_rank_zero and strategy.collectives.world_size == 1:
        module.prepare_data()  # this process has all data, and no rank is there yet
    else:
        model._launcher().launch("prepare_data", prepare_here, model, module)


def prepare_here(model: Module, module: Any) -> None:
    """Prepare the data where this rank has to; return when all ranks have come so far."""
    strategy = model._fitkit.compilation.strategy
    per_node = getattr(module, "prepare_data_per_node", True)
    if (strategy.world.local_rank if per_node else strategy.world.rank) == 0:
        module.prepare_data()
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


def only_loader(loaders: Any, verb: str, name: str) -> Any:
    """Return the loader that a verb reads.

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
    raise refusal(
        f"{name} returned {len(loaders)} loaders, but {verb} reads one a call. Call {verb} for "
        f"each of them: {verb}(datamodule.{name}()[{key}])."
    )


# ---------------------------------------------------------------------- batches on their way


def transfer_of(model: Module, module: Any) -> Any:
    """Return how a data module moves batches; None where it has no hooks for them."""
    if not any(defines(module, name) for name in TRANSFERS):
        return None
    return partial(moved, model, module)


def moved(model: Module, module: Any, batch: Any, device: torch.device) -> Any:
    """Move a batch by the hooks of a data module, and where it has none by those of the model.

    As in Lightning, the data module's hook goes before that of the LightningModule.
    """
    guest = guest_of(model)
    net = None if guest is None else guest.given
    before, move, after = (
        next((one for one in (module, net) if one is not None and defines(one, name)), None)
        for name in TRANSFERS
    )
    if before is not None:
        batch = before.on_before_batch_transfer(batch, 0)
    if move is not None:
        batch = move.transfer_batch_to_device(batch, device, 0)
    else:
        batch = model.transfer_batch_to_device(batch, device)
    return batch if after is None else after.on_after_batch_transfer(batch, 0)


def refusal(message: str) -> ConfigurationError:
    return ConfigurationError(message, code="FK090")


class Place:
    """What a data module may ask its trainer, until the model's own is here."""

    def __init__(self, model: Module, module: Any) -> None:
        self.model, self.datamodule = model, module

    @property
    def global_rank(self) -> int:
        return self.model.global_rank

    @property
    def world_size(self) -> int:
        return self.model._fitkit.compilation.strategy.world.size


def trainer_of(model: Module, module: Any) -> Any:
    return Place(model, module)
