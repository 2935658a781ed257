"""A net as a file that runs without fitkit, and without the net's own code."""

from fitkit.extras.export.exporting import export

__all__ = ["export"]
