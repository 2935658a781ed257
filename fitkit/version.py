"""The version, where the lowest layers can read it too."""

__version__ = "0.1.0"
