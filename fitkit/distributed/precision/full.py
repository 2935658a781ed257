"""No change of number types."""

from __future__ import annotations

from fitkit.distributed.precision.base import Precision


class FullPrecision(Precision):
    """The module computes in the dtype that it has (float32 unless its maker chose another).

    One that a "-true" precision has cast before gets its own dtypes back.
    """

    name = "32-true"
