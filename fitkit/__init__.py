"""fitkit: Keras's verbs on any PyTorch network."""

from typing import TYPE_CHECKING

from fitkit import callbacks, data, losses, optimizers, precisions, strategies
from fitkit.callbacks import History
from fitkit.errors import (
    CheckpointError,
    ConfigurationError,
    FitkitError,
    OutOfMemoryError,
    WorkerError,
)
from fitkit.model import Model, load_model
from fitkit.namesake import warn_of_namesake
from fitkit.random_states import set_seed
from fitkit.registry import imported_on_demand
from fitkit.version import __version__ as __version__

if TYPE_CHECKING:
    from fitkit import loggers, pictures, sklearn, transforms, tune
    from fitkit.extras.activation_checkpointing import checkpoint_activations
    from fitkit.extras.free_devices import find_usable_cuda_devices
    from fitkit.extras.planning import plan
    from fitkit.extras.verification.verifying import verify
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            "checkpoint_activations": (
                "fitkit.extras.activation_checkpointing:checkpoint_activations"
            ),
            "find_usable_cuda_devices": "fitkit.extras.free_devices:find_usable_cuda_devices",
            "loggers": "fitkit.loggers",
            "pictures": "fitkit.pictures",
            "plan": "fitkit.extras.planning:plan",
            "sklearn": "fitkit.sklearn",
            "transforms": "fitkit.transforms",
            "tune": "fitkit.tune",
            "verify": "fitkit.extras.verification.verifying:verify",
        },
    )

warn_of_namesake()

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "FitkitError",
    "History",
    "Model",
    "OutOfMemoryError",
    "WorkerError",
    "callbacks",
    "checkpoint_activations",
    "data",
    "find_usable_cuda_devices",
    "load_model",
    "loggers",
    "losses",
    "optimizers",
    "pictures",
    "plan",
    "precisions",
    "set_seed",
    "sklearn",
    "strategies",
    "transforms",
    "tune",
    "verify",
]


def __dir__() -> list[str]:
    """List the public names only. The internal modules can still be imported."""
    return __all__
