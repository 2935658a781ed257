"""Callbacks: the base class, and all callbacks of fitkit."""

from typing import TYPE_CHECKING

from fitkit.callbacks.backup import BackupAndRestore
from fitkit.callbacks.base import Callback, CallbackList, LambdaCallback
from fitkit.callbacks.early_stopping import EarlyStopping, OptunaPruning
from fitkit.callbacks.history import History
from fitkit.callbacks.model_checkpoint import ModelCheckpoint
from fitkit.callbacks.progress import ProgressBar
from fitkit.callbacks.rates import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
    LearningRateScheduler,
    ReduceLROnPlateau,
)
from fitkit.callbacks.text_files import CSVLogger, JSONLogger
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.callbacks.averages import EMA, StochasticWeightAveraging, SwapEMAWeights
    from fitkit.callbacks.evaluations import EvaluateEvery, MetricCallback
    from fitkit.callbacks.finetuning import BackboneFinetuning, GradualUnfreezing
    from fitkit.callbacks.profiler import Profiler
    from fitkit.callbacks.ray_train import RayTrainReport
    from fitkit.callbacks.resources import DeviceStatsMonitor, ThroughputMonitor, Timer
    from fitkit.callbacks.watches import (
        DetectLossSpike,
        DetectNonFinite,
        NormMonitor,
        TerminateOnNaN,
    )
    from fitkit.loggers.tensorboard import TensorBoard
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            name: f"{home}:{name}"
            for home, names in {
                "fitkit.callbacks.averages": ("EMA", "StochasticWeightAveraging", "SwapEMAWeights"),
                "fitkit.callbacks.evaluations": ("EvaluateEvery", "MetricCallback"),
                "fitkit.callbacks.finetuning": ("BackboneFinetuning", "GradualUnfreezing"),
                "fitkit.callbacks.profiler": ("Profiler",),
                "fitkit.callbacks.ray_train": ("RayTrainReport",),
                "fitkit.callbacks.resources": ("DeviceStatsMonitor", "ThroughputMonitor", "Timer"),
                "fitkit.callbacks.watches": (
                    "DetectLossSpike",
                    "DetectNonFinite",
                    "NormMonitor",
                    "TerminateOnNaN",
                ),
                "fitkit.loggers.tensorboard": ("TensorBoard",),
            }.items()
            for name in names
        },
    )

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
