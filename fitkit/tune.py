"""Search a learning rate or a batch size before the training; compare models over many runs."""

from fitkit.extras.trials.compared import Comparison, compare
from fitkit.extras.tune import RateRange, batch_size, learning_rate

__all__ = ["Comparison", "RateRange", "batch_size", "compare", "learning_rate"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
