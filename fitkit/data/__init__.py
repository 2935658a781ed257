"""Data: sources of batches for everything that users pass, and batches of uneven sequences."""

from fitkit.data.collate import BucketBatchSampler, pack, pad
from fitkit.data.combined import CombinedLoader
from fitkit.data.permutation import PermutationSampler

__all__ = ["BucketBatchSampler", "CombinedLoader", "PermutationSampler", "pack", "pad"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
