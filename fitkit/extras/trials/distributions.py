"""Probabilities of the beta distribution, and of what follows from it: binomials and Student's t.

SciPy has all of it, and isn't needed for these few.
"""

from __future__ import annotations

import math
from collections.abc import Callable

STEPS = 300
"""Of the continued fraction; it needs some times the square root of the larger parameter."""


def beta_below(x: float, a: float, b: float) -> float:
    """Return the probability that a number of the beta distribution is below x.

    Reference: Press et al., Numerical Recipes, 2007, section 6.4 (the continued fraction by Lentz).

    Example:
        >>> from fitkit.extras.trials.distributions import beta_below
        >>> round(beta_below(0.3, 1, 1), 6)
        0.3
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - beta_below(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    least = 1e-300
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1), least)
    found = d
    for step in range(1, STEPS + int(10 * math.sqrt(max(a, b)))):
        for factor in (
            step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step)),
            -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1)),
        ):
            d = 1 / _not_zero(1 + factor * d, least)
            c = _not_zero(1 + factor / c, least)
            found *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * found / a


def _not_zero(value: float, least: float) -> float:
    return value if abs(value) > least else least


def _solved(below: Callable[[float], float], wanted: float) -> float:
    """Return where a rising function of 0 to 1 has a value."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if below(middle) < wanted else (low, middle)
    return (low + high) / 2


def share_interval(count: int, total: int, level: float) -> tuple[float, float]:
    """Return the exact interval of a probability that gave `count` of `total`.

    Reference: Clopper and Pearson, The use of confidence or fiducial limits, 1934.
    """
    part = (1 - level) / 2
    low = _solved(lambda x: beta_below(x, count, total - count + 1), part) if count else 0.0
    if count == total:
        return low, 1.0
    return low, _solved(lambda x: beta_below(x, count + 1, total - count), 1 - part)


def even_odds(count: int, total: int) -> float:
    """Return how often `total` fair coins are at least as uneven as `count` to the rest."""
    fewer = min(count, total - count)
    if 2 * fewer == total:
        return 1.0
    return min(1.0, 2 * beta_below(0.5, total - fewer, fewer + 1))


def t_beyond(t: float, freedom: int) -> float:
    """Return the probability that Student's t is further from 0 than this."""
    return beta_below(freedom / (freedom + t * t), freedom / 2, 0.5)


def t_reach(level: float, freedom: int) -> float:
    """Return how far from 0 Student's t is at most in `level` of all cases."""
    part = _solved(lambda x: beta_below(x, freedom / 2, 0.5), 1 - level)
    return math.sqrt(freedom * (1 - part) / part)
