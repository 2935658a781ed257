"""Loggers: callbacks that send a training's numbers, settings and pictures somewhere."""

from fitkit.foreign_names import no_attribute
from fitkit.loggers.base import Logger
from fitkit.loggers.lightning import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from fitkit.loggers.services import MLflow, WandB
from fitkit.loggers.tensorboard import TensorBoard
from fitkit.loggers.text import CSV, JSONLines

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


def __getattr__(name: str) -> object:
    """Tell what a peer's name is here.

    Raises:
        AttributeError: always: only names that aren't there are asked for.
    """
    raise no_attribute(__name__, name)
