"""Loggers: callbacks that send a training's numbers, settings and pictures somewhere."""

from fitkit.loggers.base import Logger
from fitkit.loggers.services import MLflow, WandB
from fitkit.loggers.tensorboard import TensorBoard
from fitkit.loggers.text import CSV, JSONLines

__all__ = ["CSV", "JSONLines", "Logger", "MLflow", "TensorBoard", "WandB"]
