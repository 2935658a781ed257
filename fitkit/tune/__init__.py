"""Finding a learning rate or a batch size by trying; the model is left as it was."""

from fitkit.tune.largest_batch import batch_size
from fitkit.tune.rate_range import RateRange, learning_rate

__all__ = ["RateRange", "batch_size", "learning_rate"]
