"""In which number types a net computes."""

from fitkit.distributed.precision.base import Precision
from fitkit.distributed.precision.float8 import Float8Mixed
from fitkit.distributed.precision.float8_layers import plain_layers
from fitkit.distributed.precision.full import FullPrecision
from fitkit.distributed.precision.mixed import BFloat16Mixed, HalfMixed, MixedPrecision
from fitkit.distributed.precision.own_dtypes import match_state
from fitkit.distributed.precision.resolve import PRECISIONS, resolve_precision
from fitkit.distributed.precision.scaling import CLOSURE, Scaling, scaled_steps
from fitkit.distributed.precision.true import (
    BFloat16Precision,
    DoublePrecision,
    HalfPrecision,
    TruePrecision,
)

__all__ = [
    "CLOSURE",
    "PRECISIONS",
    "BFloat16Mixed",
    "BFloat16Precision",
    "DoublePrecision",
    "Float8Mixed",
    "FullPrecision",
    "HalfMixed",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "Scaling",
    "TruePrecision",
    "match_state",
    "plain_layers",
    "resolve_precision",
    "scaled_steps",
]
