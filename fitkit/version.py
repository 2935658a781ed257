"""The version, where the lowest layers can read it too."""

__version__ = "0.1.0"

DISTRIBUTION = "torch-fitkit"
"""The name on the package index, where `fitkit` is another package."""
