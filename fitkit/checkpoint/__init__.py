"""Files: weights in HDF5, written whole or not at all."""

from fitkit.checkpoint.comparison import LoadedWeights
from fitkit.checkpoint.container import Reader, read_container, write_container
from fitkit.checkpoint.weights import load_weights, save_weights

__all__ = [
    "LoadedWeights",
    "Reader",
    "load_weights",
    "read_container",
    "save_weights",
    "write_container",
]
