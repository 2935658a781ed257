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
    """Explain a name that fitkit doesn't have, such as one from Keras or Lightning.

    Raises:
        AttributeError: always, because Python calls this for unknown names only.
    """
    raise no_attribute(__name__, name)


def __dir__() -> list[str]:
    """List the public names only. The internal modules can still be imported."""
    return __all__
