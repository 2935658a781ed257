"""Search a learning rate or a batch size before the training."""

from fitkit.extras.tune import RateRange, batch_size, learning_rate

__all__ = ["RateRange", "batch_size", "learning_rate"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
