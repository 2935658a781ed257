"""Data: anything that users pass, as a source of batches."""

from fitkit.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
