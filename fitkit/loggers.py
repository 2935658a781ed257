"""Loggers: callbacks that record a training's numbers, settings and figures."""

from fitkit.extras.loggers.base import Logger
from fitkit.extras.loggers.lightning import (
    CSVLogger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from fitkit.extras.loggers.services import MLflow, WandB
from fitkit.extras.loggers.tensorboard import TensorBoard
from fitkit.extras.loggers.text import CSV, JSONLines
from fitkit.foreign_names import no_attribute

__all__ = [
    "CSV",
    "CSVLogger",
    "JSONLines",
    "Logger",
    "MLFlowLogger",
    "MLflow",
    "TensorBoard",
    "TensorBoardLogger",
    "WandB",
    "WandbLogger",
]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__


def __getattr__(name: str) -> object:
    """Explain a name that fitkit doesn't have, such as one from Keras or Lightning.

    Raises:
        AttributeError: always, because Python calls this for unknown names only.
    """
    raise no_attribute(__name__, name)
