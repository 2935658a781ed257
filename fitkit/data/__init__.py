"""Data: sources of batches for everything that users pass, and batches of uneven sequences."""

from typing import TYPE_CHECKING

from fitkit.data.permutation import PermutationSampler
from fitkit.data.seeded import sample_seed
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras.collate import BucketBatchSampler, pack, pad
    from fitkit.extras.combined import CombinedLoader
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            "BucketBatchSampler": "fitkit.extras.collate:BucketBatchSampler",
            "CombinedLoader": "fitkit.extras.combined:CombinedLoader",
            "pack": "fitkit.extras.collate:pack",
            "pad": "fitkit.extras.collate:pad",
        },
    )

__all__ = [
    "BucketBatchSampler",
    "CombinedLoader",
    "PermutationSampler",
    "pack",
    "pad",
    "sample_seed",
]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
