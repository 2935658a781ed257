"""In which number types a net computes."""

from __future__ import annotations

import numbers

import torch

from fitkit.arguments import describe
from fitkit.distributed.precision.base import (
    BFloat16Mixed,
    BFloat16Precision,
    DoublePrecision,
    FullPrecision,
    HalfMixed,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TruePrecision,
    match_state,
    plain_layers,
)
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.registry import Registry, normalise, subclass_of

__all__ = [
    "PRECISIONS",
    "BFloat16Mixed",
    "BFloat16Precision",
    "DoublePrecision",
    "FullPrecision",
    "HalfMixed",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TruePrecision",
    "match_state",
    "plain_layers",
    "resolve_precision",
]

PRECISIONS: Registry[type[Precision]] = Registry(
    "precision",
    group="fitkit.precisions",
    accepts=subclass_of(Precision),
    expected="a subclass of fitkit.precisions.Precision",
)
PRECISIONS.add("32-true", FullPrecision, "32")
PRECISIONS.add("64-true", DoublePrecision, "64")
PRECISIONS.add("16-mixed", HalfMixed, "16")
PRECISIONS.add("bf16-mixed", BFloat16Mixed, "bf16")
PRECISIONS.add("16-true", HalfPrecision)
PRECISIONS.add("bf16-true", BFloat16Precision)
# The last is Lightning's word for 8-bit floats, after the package that it takes for them.
PRECISIONS.promise(
    "fitkit.extras.float8:Float8Mixed", "fp8-mixed", "fp8", "float8", "transformer-engine"
)

OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "fp16": ("16-mixed", "16-true"),
    "float16": ("16-mixed", "16-true"),
    "half": ("16-mixed", "16-true"),
    "mixedfloat16": ("16-mixed",),
    "fp16mixed": ("16-mixed",),
    "bfloat16": ("bf16-mixed", "bf16-true"),
    "mixedbfloat16": ("bf16-mixed",),
    "fp32": ("32-true",),
    "float32": ("32-true",),
    "float": ("32-true",),
    "full": ("32-true",),
    "no": ("32-true",),
    "fp64": ("64-true",),
    "float64": ("64-true",),
    "double": ("64-true",),
}
"""What to write for the words of Accelerate, Keras and torch, in `normalise`'s form."""

EIGHT_BITS = ("8", "fp8", "float8", "int8", "transformerengine", "te")
"""How other words for 8-bit arithmetic begin or read, in `normalise`'s form."""


def resolve_precision(precision: object) -> Precision:
    """Return the precision that a word, a number of bits or an object means.

    Args:
        precision: a name in any case, 16, 32 or 64, or a `Precision`.

    Raises:
        ConfigurationError: an unknown word; the message has all that are known.
        ArgumentTypeError: neither.
    """
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, torch.dtype):
        raise ArgumentTypeError(
            f"precision={precision} doesn't say what gets that dtype. Write one of {_known()}: "
            "'-true' casts the net, '-mixed' only what is computed."
        )
    if isinstance(precision, bool) or not isinstance(precision, (numbers.Integral, str)):
        raise ArgumentTypeError(
            f"precision={describe(precision)} must be a name or a number of bits: {_known()}."
        )
    word = str(precision)
    if word not in PRECISIONS and normalise(word) in OTHER_WORDS:
        mixed, *true = map(repr, OTHER_WORDS[normalise(word)])
        also = f", or {true[0]}, which casts the weights too" if true else ""
        raise ConfigurationError(
            f"precision={precision!r} is another library's name. Write {mixed}{also}. "
            f"Known: {_known()}."
        )
    if word not in PRECISIONS and _is_eight_bits(normalise(word)):
        raise ConfigurationError(
            f"precision={precision!r} asks for 8-bit arithmetic of a kind that fitkit lacks. "
            "Write 'fp8-mixed' for products of 8-bit floats beside weights in float32. Known: "
            f"{_known()}."
        )
    return PRECISIONS[word]()


def _is_eight_bits(form: str) -> bool:
    return form in EIGHT_BITS or form.startswith(("fp8", "transformerengine"))


def _known() -> str:
    return ", ".join(repr(name) for name in PRECISIONS)
