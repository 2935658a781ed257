"""One seed for everything that draws numbers."""

from __future__ import annotations

import random

import numpy as np
import torch

from fitkit.arguments import check_count
from fitkit.errors import ConfigurationError


def set_seed(seed: int) -> int:
    """Seed Python's, NumPy's and torch's random numbers (on all devices).

    The same seed before the same calls gives the same bits on a CPU: weights, shuffling,
    dropout.

    Args:
        seed: from 0 to 2**32 - 1 (NumPy takes no more).

    Returns:
        The seed.

    Raises:
        ArgumentTypeError: not an int.
        ConfigurationError: out of range.

    Example:
        >>> import torch, fitkit
        >>> first = fitkit.set_seed(0), torch.randn(3)
        >>> again = fitkit.set_seed(0), torch.randn(3)
        >>> torch.equal(first[1], again[1])
        True
    """
    check_count("seed", seed, minimum=0)
    if seed >= 2**32:
        raise ConfigurationError(f"seed={seed} must be below 2**32 = {2**32}.")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed
