"""Callbacks: the base class, and all callbacks of fitkit."""

from typing import TYPE_CHECKING

from fitkit.callbacks.base import Callback, LambdaCallback
from fitkit.callbacks.callback_list import CALLBACKS, CallbackList
from fitkit.callbacks.early_stopping import EarlyStopping
from fitkit.callbacks.history import History
from fitkit.callbacks.model_checkpoint import ModelCheckpoint
from fitkit.callbacks.progress import ProgressBar
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras.averages import EMA, StochasticWeightAveraging, SwapEMAWeights
    from fitkit.extras.backup import BackupAndRestore
    from fitkit.extras.evaluations import EvaluateEvery, MetricCallback
    from fitkit.extras.finetuning import BackboneFinetuning, GradualUnfreezing
    from fitkit.extras.loggers.tensorboard import TensorBoard
    from fitkit.extras.optuna_pruning import OptunaPruning
    from fitkit.extras.profiler import Profiler
    from fitkit.extras.progressive import Progressive
    from fitkit.extras.rate_callbacks import (
        GradientAccumulationScheduler,
        LearningRateMonitor,
        LearningRateScheduler,
        ReduceLROnPlateau,
    )
    from fitkit.extras.ray_train import RayTrainReport
    from fitkit.extras.resources import DeviceStatsMonitor, ThroughputMonitor, Timer
    from fitkit.extras.run_folder import RunFolder
    from fitkit.extras.skip_bad_updates import SkipBadUpdates
    from fitkit.extras.stochastic_depth import StochasticDepth
    from fitkit.extras.text_files import CSVLogger, JSONLogger
    from fitkit.extras.watches import (
        DetectLossSpike,
        DetectNonFinite,
        NormMonitor,
        TerminateOnNaN,
    )

# The same homes once more, for the first use of a name: type checkers can't read them here.
_OF_EXTRAS = {
    "EMA": "fitkit.extras.averages:EMA",
    "StochasticWeightAveraging": "fitkit.extras.averages:StochasticWeightAveraging",
    "SwapEMAWeights": "fitkit.extras.averages:SwapEMAWeights",
    "BackupAndRestore": "fitkit.extras.backup:BackupAndRestore",
    "EvaluateEvery": "fitkit.extras.evaluations:EvaluateEvery",
    "MetricCallback": "fitkit.extras.evaluations:MetricCallback",
    "BackboneFinetuning": "fitkit.extras.finetuning:BackboneFinetuning",
    "GradualUnfreezing": "fitkit.extras.finetuning:GradualUnfreezing",
    "TensorBoard": "fitkit.extras.loggers.tensorboard:TensorBoard",
    "OptunaPruning": "fitkit.extras.optuna_pruning:OptunaPruning",
    "Profiler": "fitkit.extras.profiler:Profiler",
    "Progressive": "fitkit.extras.progressive:Progressive",
    "GradientAccumulationScheduler": "fitkit.extras.rate_callbacks:GradientAccumulationScheduler",
    "LearningRateMonitor": "fitkit.extras.rate_callbacks:LearningRateMonitor",
    "LearningRateScheduler": "fitkit.extras.rate_callbacks:LearningRateScheduler",
    "ReduceLROnPlateau": "fitkit.extras.rate_callbacks:ReduceLROnPlateau",
    "RayTrainReport": "fitkit.extras.ray_train:RayTrainReport",
    "DeviceStatsMonitor": "fitkit.extras.resources:DeviceStatsMonitor",
    "ThroughputMonitor": "fitkit.extras.resources:ThroughputMonitor",
    "Timer": "fitkit.extras.resources:Timer",
    "RunFolder": "fitkit.extras.run_folder:RunFolder",
    "SkipBadUpdates": "fitkit.extras.skip_bad_updates:SkipBadUpdates",
    "StochasticDepth": "fitkit.extras.stochastic_depth:StochasticDepth",
    "CSVLogger": "fitkit.extras.text_files:CSVLogger",
    "JSONLogger": "fitkit.extras.text_files:JSONLogger",
    "DetectLossSpike": "fitkit.extras.watches:DetectLossSpike",
    "DetectNonFinite": "fitkit.extras.watches:DetectNonFinite",
    "NormMonitor": "fitkit.extras.watches:NormMonitor",
    "TerminateOnNaN": "fitkit.extras.watches:TerminateOnNaN",
}
if not TYPE_CHECKING:
    __getattr__ = imported_on_demand(__name__, _OF_EXTRAS)

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
    "Progressive",
    "RayTrainReport",
    "ReduceLROnPlateau",
    "RunFolder",
    "SkipBadUpdates",
    "StochasticDepth",
    "StochasticWeightAveraging",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "ThroughputMonitor",
    "Timer",
]


for _name, _home in _OF_EXTRAS.items():
    CALLBACKS.promise(_home, _name)
for _home, _names in {
    "services": ("MLflow", "WandB"),
    "text": ("CSV", "JSONLines"),
    "trackers": ("Aim", "ClearML", "Comet", "SwanLab", "Trackio"),
}.items():
    for _name in _names:
        CALLBACKS.promise(f"fitkit.extras.loggers.{_home}:{_name}", _name)
for _name in __all__:
    if isinstance(_kind := globals().get(_name), type) and _kind not in (Callback, CallbackList):
        CALLBACKS.add(_name, _kind)


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
