"""Precisions as objects: those with options, and what one of your own derives from.

`compile(precision=…)` takes a name or one of these.
"""

from fitkit.distributed.precision import Float8Mixed, Precision

__all__ = ["Float8Mixed", "Precision"]
