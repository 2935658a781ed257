"""Loggers: callbacks that send a training's numbers, settings and pictures somewhere."""

from fitkit.loggers.base import Logger
from fitkit.loggers.mlflow_run import MLflow
from fitkit.loggers.tensorboard import TensorBoard
from fitkit.loggers.text import CSV, JSONLines
from fitkit.loggers.wandb_run import WandB

__all__ = ["CSV", "JSONLines", "Logger", "MLflow", "TensorBoard", "WandB"]
