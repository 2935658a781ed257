"""fitkit: Keras's verbs on any PyTorch network."""

from fitkit import callbacks, data, loggers, optimizers, pictures, precisions, strategies, tune
from fitkit.activation_checkpointing import checkpoint_activations
from fitkit.callbacks import History
from fitkit.distributed.free_devices import find_usable_cuda_devices
from fitkit.errors import (
    CheckpointError,
    ConfigurationError,
    FitkitError,
    OutOfMemoryError,
    WorkerError,
)
from fitkit.foreign_names import no_attribute
from fitkit.model import Model, load_model
from fitkit.planning import plan
from fitkit.random_states import set_seed
from fitkit.verification.verifying import verify
from fitkit.version import __version__ as __version__

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
    "optimizers",
    "pictures",
    "plan",
    "precisions",
    "set_seed",
    "strategies",
    "tune",
    "verify",
]


def __getattr__(name: str) -> object:
    """Tell what a peer's name is here.

    Raises:
        AttributeError: always: only names that aren't there are asked for.
    """
    raise no_attribute(__name__, name)


def __dir__() -> list[str]:
    """List what is public; the modules that make it up are there all the same."""
    return __all__
