"""An interval of a mean difference that may be looked at after every pair, until the first that
tells something.

The evidence against a mean m is a Bayes factor: a mixture over standardized differences against m,
whatever the standard deviation. It is a martingale if m is the mean of Gaussian differences. The
interval has each m against which there is too little evidence.

Reference: Lai, On confidence sequences, 1976, and Wang and Ramdas, Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance, 2023, arXiv:2310.03722, for the
evidence and its interval. There the bound is 1 / (1 - level), which holds for ever. Here the number
of looks is known, so the bound is the one that all of them together pass by luck in 1 - level of
the cases: repeated confidence intervals, Jennison and Turnbull, 1984.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

PRECISION = 2.0
"""Of the mixture: standardized differences have the variance 1/2. Where many differences are
alike, such as those of few samples, a higher one takes them less seriously."""

KEPT = 0.2
"""The part of 1 - level that is kept for differences that aren't Gaussian."""

PATHS = 50_000
"""Simulated sequences of differences. The bound's error rate is known to 0.1 points by them."""


def first_look(level: float) -> int:
    """Return how many differences there must be: with fewer, luck alone gives all of them one sign
    in more than 1 - level of the cases.

    Example:
        >>> from fitkit.extras.trials.sequential import first_look
        >>> first_look(0.95)
        6
    """
    return max(3, 1 - math.floor(math.log2(1 - level) + 1e-9))


@functools.cache
def bound(looks: int, level: float) -> float:
    """Return how much evidence (a logarithm) a look must have.

    Args:
        looks: the most differences that there will be, at least `first_look(level)`.
        level: how often no look at all may pass it, where nothing differs.
    """
    numbers = np.random.default_rng(0)
    total, squares = np.zeros(PATHS), np.zeros(PATHS)
    most = np.zeros(PATHS)
    for count in range(1, looks + 1):
        new = numbers.standard_normal(PATHS)
        total += new
        squares += new * new
        if count >= first_look(level):
            np.maximum(most, evidence(total, squares, count), out=most)
    wanted = float(np.quantile(most, 1 - (1 - KEPT) * (1 - level)))
    return min(wanted, -math.log(1 - level))  # Ville's inequality: enough for any number of looks


def evidence(total: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
    """Return the logarithm of the evidence against a mean of 0.

    Args:
        total, squares: the sums of differences and of their squares, above 0.
        count: how many differences there are.
    """
    # Theorem 4.2 of Wang and Ramdas, with a squared scale of the mixture of 1 / PRECISION.
    explained = total * total / ((count + PRECISION) * squares)
    shrunk = 0.5 * math.log(PRECISION / (count + PRECISION))
    return np.asarray(shrunk - count / 2 * np.log1p(-explained))


def interval(differences: Sequence[float], looks: int, level: float) -> tuple[float, float]:
    """Return the interval of the mean difference: low and high.

    In `level` of all sequences of runs it has the true mean at every look, so also at the one that
    ends the runs. It is infinite while there are too few differences.

    Args:
        differences: those so far, in the order of the runs.
        looks: the most that there will be.
        level: such as 0.95.

    Example:
        >>> from fitkit.extras.trials.sequential import interval
        >>> low, high = interval([0.3, 0.5, 0.4, 0.4, 0.6, 0.5, 0.4], looks=20, level=0.95)
        >>> 0.2 < low < high < 0.7
        True
    """
    count = len(differences)
    if count < first_look(level):
        return -math.inf, math.inf
    values = np.asarray(differences, np.float64)
    mean = float(values.mean())
    spread = float(np.square(values - mean).sum())
    # Solved for the m at which the evidence of `values - m` is the bound.
    log_part = 2 * bound(looks, level) + math.log((count + PRECISION) / PRECISION)
    part = -math.expm1(-log_part / count)
    room = count**2 / (count + PRECISION) - part * count
    if room <= 0:
        return -math.inf, math.inf
    reach = math.sqrt(part * spread / room)
    return mean - reach, mean + reach
