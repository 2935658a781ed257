"""Pictures of a training and of its results (with matplotlib), and tables for notebooks."""

from fitkit.extras.pictures.confusion_matrix import confusion_counts, confusion_matrix
from fitkit.extras.pictures.curves import learning_curves
from fitkit.extras.pictures.run_values import run_values

__all__ = ["confusion_counts", "confusion_matrix", "learning_curves", "run_values"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
