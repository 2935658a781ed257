"""In which number types a net computes."""

from fitkit.distributed.precision.base import Precision
from fitkit.distributed.precision.full import FullPrecision
from fitkit.registry import Registry

PRECISIONS: Registry[type[Precision]] = Registry(
    "precision", hint="The other precisions of fitkit's contract come with a later version."
)
PRECISIONS.add("32-true", FullPrecision, "32")


def resolve_precision(precision: object) -> Precision:
    """The precision that a word or an object means.

    Raises:
        ConfigurationError: an unknown word.
    """
    if isinstance(precision, Precision):
        return precision
    return PRECISIONS[str(precision)]()


__all__ = ["PRECISIONS", "FullPrecision", "Precision", "resolve_precision"]
