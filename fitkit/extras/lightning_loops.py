"""What a `LightningModule` asks of its trainer's loops, such as whether there is a validation."""

from __future__ import annotations

import weakref
from typing import Any

from fitkit.extras.lightning_base import ServedModel, Unknown
from fitkit.extras.lightning_hooks import defines


class Loop(Unknown):
    """A loop of the trainer, as far as modules ask it.

    Args:
        model: the model.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model_ref = weakref.ref(model)

    @property
    def _model(self) -> ServedModel:
        model = self._model_ref()
        assert model is not None
        return model


class FitLoop(Loop):
    """`trainer.fit_loop`."""

    KNOWN_AS = "trainer.fit_loop"

    @property
    def epoch_loop(self) -> EpochLoop:
        """The loop over an epoch's batches."""
        return EpochLoop(self._model)

    @property
    def max_epochs(self) -> int | None:
        """The `epochs` of `fit`."""
        found: int | None = self._model.trainer.max_epochs
        return found

    @property
    def max_batches(self) -> float:
        """The batches of an epoch on this rank; infinite if unknown."""
        found: float = self._model.trainer.num_training_batches
        return found


class EpochLoop(Loop):
    """`trainer.fit_loop.epoch_loop`."""

    KNOWN_AS = "trainer.fit_loop.epoch_loop"

    @property
    def val_loop(self) -> ValidationLoop:
        """The loop over validation batches."""
        return ValidationLoop(self._model)

    @property
    def batch_idx(self) -> int:
        """The number of the current batch in the epoch; -1 before the first."""
        run: Any = self._model.run
        index: int = -1 if run is None or run.batch is None else run.steps_done
        return index

    @property
    def global_step(self) -> int:
        """The number of updates."""
        found: int = self._model.trainer.global_step
        return found


class ValidationLoop(Loop):
    """`trainer.fit_loop.epoch_loop.val_loop`."""

    KNOWN_AS = "trainer.fit_loop.epoch_loop.val_loop"

    @property
    def max_batches(self) -> list[float]:
        """The batches of each validation set on this rank."""
        found: list[float] = self._model.trainer.num_val_batches
        return found

    @property
    def _data_source(self) -> ValidationData:
        return ValidationData(self._model)


class ValidationData(Loop):
    """Where the data to validate on come from."""

    KNOWN_AS = "trainer.fit_loop.epoch_loop.val_loop._data_source"

    def is_defined(self) -> bool:
        """Return whether the running `fit` has data to validate on."""
        run: Any = self._model.run
        if run is not None:
            return bool(run.held_out)
        call = self._model.call
        if call.get("validation_data") is not None or call.get("validation_split"):
            return True
        data = call.get("datamodule")
        return data is not None and defines(data, "val_dataloader")
