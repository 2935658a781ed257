"""fitkit's loggers as a `LightningModule` uses them: `self.logger`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from fitkit.arguments import plain_settings
from fitkit.errors import ConfigurationError
from fitkit.extras.lightning_base import ServedModel, Unknown
from fitkit.extras.loggers.base import Logger, hyperparameters_of, scalars

BEFORE_EPOCHS = ("on_fit_start", "on_train_start")
"""Hooks in which a logger isn't open yet: only a checkpoint says which run it continues."""


class Nothing:
    """What `experiment` is on ranks that write nothing: any method may be called."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self


class ModuleLogger(Unknown):
    """A logger of fitkit's with Lightning's methods; its own are there, too.

    Args:
        logger: a logger of the running `fit`.
        model: the model.
    """

    KNOWN_AS = "logger"
    INSTEAD: ClassVar[dict[str, str]] = dict.fromkeys(
        ("log_image", "log_table", "log_text", "log_graph", "watch", "run_id"),
        "use self.logger.experiment, with which the logger writes",
    )

    def __init__(self, logger: Logger, model: ServedModel) -> None:
        self._logger, self._model_ref = logger, weakref.ref(model)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        logger = vars(self).get("_logger")
        if logger is not None and hasattr(logger, name):
            return getattr(logger, name)
        return super().__getattr__(name)

    @property
    def log_dir(self) -> str:
        """The logger's folder, if it has one."""
        return os.fspath(self._logger.log_dir)  # type: ignore[attr-defined]

    @property
    def _model(self) -> ServedModel:
        model = self._model_ref()
        assert model is not None
        return model

    def _is_early(self) -> bool:
        return self._model.hooks.running in BEFORE_EPOCHS

    def _open(self) -> Logger:
        """Return the logger, open; its own hook of this epoch comes after the module's."""
        if not self._logger._is_open:
            self._logger.on_epoch_begin(self._model.current_epoch)
        return self._logger

    @property
    def experiment(self) -> Any:
        """What the logger writes with, such as TensorBoard's writer; does nothing elsewhere than
        on rank 0.
        """
        if not self._model.is_global_zero:
            return Nothing()
        if self._is_early():
            raise ConfigurationError(
                f"self.logger.experiment was read in {self._model.hooks.running}, before the "
                "logger is open. Read it in on_train_epoch_start, or later.",
                code="FK083",
            )
        return self._open().writes_with()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers by name, on rank 0.

        Args:
            metrics: the numbers.
            step: their place on the horizontal axis. Default: the number of updates.
        """
        model = self._model
        if not model.is_global_zero:
            return
        if self._is_early():
            model.trainer.held.append(lambda: self.log_metrics(metrics, step))
            return
        place = model.global_step if step is None else int(step)
        self._open().log_scalars(scalars(metrics), place, None)

    def log_hyperparams(self, params: Any, *others: Any, **more: Any) -> None:
        """Record settings by name beside those that fitkit records, on rank 0."""
        model = self._model
        if not model.is_global_zero:
            return
        if self._is_early():
            model.trainer.held.append(lambda: self.log_hyperparams(params))
            return
        given = params if isinstance(params, Mapping) else vars(params)
        logger = self._open()
        known = hyperparameters_of(model, logger.params)
        logger.log_hyperparameters({**known, **plain_settings(dict(given))})
