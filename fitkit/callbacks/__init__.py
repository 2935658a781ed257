"""Callbacks: the base class, and those that ship."""

import importlib
from typing import TYPE_CHECKING, Any

from fitkit.callbacks.accumulation import GradientAccumulationScheduler
from fitkit.callbacks.averages import EMA, StochasticWeightAveraging, SwapEMAWeights
from fitkit.callbacks.backbone_finetuning import BackboneFinetuning
from fitkit.callbacks.backup import BackupAndRestore
from fitkit.callbacks.base import Callback, LambdaCallback
from fitkit.callbacks.collection import CallbackList
from fitkit.callbacks.device_stats import DeviceStatsMonitor
from fitkit.callbacks.early_stopping import EarlyStopping
from fitkit.callbacks.evaluate_every import EvaluateEvery, MetricCallback
from fitkit.callbacks.history import History
from fitkit.callbacks.model_checkpoint import ModelCheckpoint
from fitkit.callbacks.optuna_pruning import OptunaPruning
from fitkit.callbacks.profiler import Profiler
from fitkit.callbacks.progress import ProgressBar
from fitkit.callbacks.rates import LearningRateMonitor, LearningRateScheduler, ReduceLROnPlateau
from fitkit.callbacks.text_files import CSVLogger, JSONLogger
from fitkit.callbacks.throughput import ThroughputMonitor
from fitkit.callbacks.timer import Timer
from fitkit.callbacks.watches import DetectLossSpike, DetectNonFinite, TerminateOnNaN

if TYPE_CHECKING:
    from fitkit.loggers import TensorBoard

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
    "History",
    "JSONLogger",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateScheduler",
    "MetricCallback",
    "ModelCheckpoint",
    "OptunaPruning",
    "Profiler",
    "ProgbarLogger",
    "ProgressBar",
    "ReduceLROnPlateau",
    "StochasticWeightAveraging",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "ThroughputMonitor",
    "Timer",
]


def __getattr__(name: str) -> Any:
    """`TensorBoard`, which Keras has here: loggers are callbacks, so they lie a layer above."""
    if name == "TensorBoard":
        return importlib.import_module("fitkit.loggers").TensorBoard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
