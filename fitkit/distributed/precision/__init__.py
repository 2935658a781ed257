"""In which number types a net computes."""

from fitkit.arguments import describe
from fitkit.distributed.precision.base import Precision
from fitkit.distributed.precision.full import FullPrecision
from fitkit.errors import ArgumentTypeError
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
    if isinstance(precision, bool) or not isinstance(precision, (int, str)):
        raise ArgumentTypeError(f"precision={describe(precision)} must be a name like '32-true'.")
    return PRECISIONS[str(precision)]()


__all__ = ["PRECISIONS", "FullPrecision", "Precision", "resolve_precision"]
