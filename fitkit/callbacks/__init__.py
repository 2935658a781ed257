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
    from fitkit.extras.averages import EMA, StochasticWeightAveraging, SwapEMAWeights
    from fitkit.extras.evaluations import EvaluateEvery, MetricCallback
    from fitkit.extras.finetuning import BackboneFinetuning, GradualUnfreezing
    from fitkit.extras.loggers.tensorboard import TensorBoard
    from fitkit.extras.profiler import Profiler
    from fitkit.extras.ray_train import RayTrainReport
    from fitkit.extras.resources import DeviceStatsMonitor, ThroughputMonitor, Timer
    from fitkit.extras.watches import (
        DetectLossSpike,
        DetectNonFinite,
        NormMonitor,
        TerminateOnNaN,
    )
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            name: f"{home}:{name}"
            for home, names in {
                "fitkit.extras.averages": ("EMA", "StochasticWeightAveraging", "SwapEMAWeights"),
                "fitkit.extras.evaluations": ("EvaluateEvery", "MetricCallback"),
                "fitkit.extras.finetuning": ("BackboneFinetuning", "GradualUnfreezing"),
                "fitkit.extras.profiler": ("Profiler",),
                "fitkit.extras.ray_train": ("RayTrainReport",),
                "fitkit.extras.resources": ("DeviceStatsMonitor", "ThroughputMonitor", "Timer"),
                "fitkit.extras.watches": (
                    "DetectLossSpike",
                    "DetectNonFinite",
                    "NormMonitor",
                    "TerminateOnNaN",
                ),
                "fitkit.extras.loggers.tensorboard": ("TensorBoard",),
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
