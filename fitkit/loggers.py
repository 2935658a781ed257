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
from fitkit.registry import imported_on_demand

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

__getattr__ = imported_on_demand(__name__, {})  # explains names of other libraries


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
