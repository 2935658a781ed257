"""fitkit: Keras's verbs on any PyTorch network."""
# TEMPORARY while the parts are being written in parallel: names are resolved lazily.
from fitkit.errors import CheckpointError, ConfigurationError, FitkitError, WorkerError
from fitkit.seeding import set_seed
__version__ = "0.1.0.dev0"
def __getattr__(name):
    if name == "Model":
        from fitkit.model import Model
        return Model
    if name in ("callbacks", "strategies"):
        import importlib
        return importlib.import_module(f"fitkit.{name}")
    raise AttributeError(name)
