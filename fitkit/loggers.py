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
from fitkit.extras.loggers.trackers import Aim, ClearML, Comet, SwanLab, Tracker, Trackio
from fitkit.registry import imported_on_demand

__all__ = [
    "CSV",
    "Aim",
    "CSVLogger",
    "ClearML",
    "Comet",
    "JSONLines",
    "Logger",
    "MLFlowLogger",
    "MLflow",
    "SwanLab",
    "TensorBoard",
    "TensorBoardLogger",
    "Tracker",
    "Trackio",
    "WandB",
    "WandbLogger",
]

__getattr__ = imported_on_demand(__name__, {})  # explains names of other libraries


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
