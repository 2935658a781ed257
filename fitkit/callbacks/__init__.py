"""Callbacks: the base class, and all callbacks of fitkit."""

import importlib
from typing import Any

from fitkit.callbacks.averages import EMA, StochasticWeightAveraging, SwapEMAWeights
from fitkit.callbacks.backup import BackupAndRestore
from fitkit.callbacks.base import Callback, CallbackList, LambdaCallback
from fitkit.callbacks.early_stopping import EarlyStopping, OptunaPruning
from fitkit.callbacks.evaluations import EvaluateEvery, MetricCallback
from fitkit.callbacks.finetuning import BackboneFinetuning, GradualUnfreezing
from fitkit.callbacks.history import History
from fitkit.callbacks.model_checkpoint import ModelCheckpoint
from fitkit.callbacks.profiler import Profiler
from fitkit.callbacks.progress import ProgressBar
from fitkit.callbacks.rates import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
    LearningRateScheduler,
    ReduceLROnPlateau,
)
from fitkit.callbacks.ray_train import RayTrainReport
from fitkit.callbacks.resources import DeviceStatsMonitor, ThroughputMonitor, Timer
from fitkit.callbacks.text_files import CSVLogger, JSONLogger
from fitkit.callbacks.watches import (
    DetectLossSpike,
    DetectNonFinite,
    NormMonitor,
    TerminateOnNaN,
)
from fitkit.foreign_names import no_attribute

ProgbarLogger = ProgressBar
"""Keras's name for the progress bar."""

__all__ = [
    "EMA",
    "BackboneFinetuning",
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "DetectLossSpike",
    "DetectNonFinite",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "EvaluateEvery",
    "GradientAccumulationScheduler",
    "GradualUnfreezing",
    "History",
    "JSONLogger",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateScheduler",
    "MetricCallback",
    "ModelCheckpoint",
    "NormMonitor",
    "OptunaPruning",
    "Profiler",
    "ProgbarLogger",
    "ProgressBar",
    "RayTrainReport",
    "ReduceLROnPlateau",
    "StochasticWeightAveraging",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "ThroughputMonitor",
    "Timer",
]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__


def __getattr__(name: str) -> Any:
    """Return `TensorBoard`, which Keras has here. It isn't imported above: loggers import this.

    Raises:
        AttributeError: any other name. For a name from Keras or Lightning, the message says what to
            write instead.
    """
    if name == "TensorBoard":
        return importlib.import_module("fitkit.loggers").TensorBoard
    raise no_attribute(__name__, name)
