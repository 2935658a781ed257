"""Precisions as objects: those with options, and the base class for your own.

`compile(precision=…)` takes a name or one of these objects.
"""

from fitkit.distributed.precision import Float8Mixed, Precision

__all__ = ["Float8Mixed", "Precision"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
