"""The interval that may be looked at after each run: how often it is wrong, and what it costs."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from fitkit.extras.trials.sequential import bound, first_look, interval

LOOKS, LEVEL, PATHS = 20, 0.95, 1000

DIGITS = [
    0.9472, 0.9500, 0.9417, 0.9472, 0.9444, 0.9361, 0.9528, 0.9444, 0.9500, 0.9389,
    0.9417, 0.9556, 0.9472, 0.9389, 0.9500, 0.9444, 0.9472, 0.9528, 0.9417, 0.9444,
]  # fmt: skip
"""Accuracies of a small net on 360 digits, with 20 seeds."""

NOISES = {
    "gaussian": lambda numbers, shape: numbers.normal(size=shape),
    "exponential": lambda numbers, shape: numbers.exponential(size=shape),
    "log-normal": lambda numbers, shape: numbers.lognormal(size=shape),
    "digits": lambda numbers, shape: numbers.choice(DIGITS, shape),
}


def ends(differences):
    """When the interval first leaves 0, and None if it never does."""
    for count in range(1, len(differences) + 1):
        low, high = interval(differences[:count], LOOKS, LEVEL)
        if low > 0 or high < 0:
            return count
    return None


@pytest.mark.parametrize("noise", NOISES)
def test_luck_alone_seldom_settles_anything_whatever_the_noise_of_the_runs(noise):
    numbers = np.random.default_rng(7)
    one, other = (NOISES[noise](numbers, (PATHS, LOOKS)) for _ in range(2))
    settled = sum(ends(row) is not None for row in other - one)
    assert settled / PATHS <= 1 - LEVEL


def test_it_needs_three_fifths_of_the_seeds_of_a_fixed_t_test_with_its_power():
    numbers, effects = np.random.default_rng(3), (1.0, 1.25, 1.5, 2.0, 3.0)
    found = [
        [ends(row + effect) for row in numbers.normal(size=(200, LOOKS))] for effect in effects
    ]
    power = np.mean([count is not None for counts in found for count in counts])
    seeds = np.mean([count or LOOKS for counts in found for count in counts])

    def fixed(count):
        at = stats.t.ppf(1 - (1 - LEVEL) / 2, count - 1)
        return np.mean([stats.nct.sf(at, count - 1, e * math.sqrt(count)) for e in effects])

    needed = next(count for count in range(2, 100) if fixed(count) >= power)
    assert power > 0.97
    assert seeds <= 0.6 * needed


def test_its_ends_have_the_evidence_of_the_bound():
    """By the densities of t, integrated over the mixture, in place of the closed form."""
    differences = np.random.default_rng(0).normal(0.4, 1, 9)
    for mean in interval(differences, LOOKS, LEVEL):
        count = len(differences)
        t = (differences.mean() - mean) / (differences.std(ddof=1) / math.sqrt(count))

        def density(effect, t=t, count=count):
            prior = stats.norm.pdf(effect, scale=math.sqrt(0.5))
            return stats.nct.pdf(t, count - 1, effect * math.sqrt(count)) * prior

        mixed, _ = integrate.quad(density, -6, 6)
        evidence = math.log(mixed / stats.t.pdf(t, count - 1))
        assert evidence == pytest.approx(bound(LOOKS, LEVEL), rel=1e-6)


def test_equal_differences_are_seen_late_and_never_before_the_first_look():
    assert first_look(0.95) == 6  # 2 / 2**6 < 0.05 < 2 / 2**5
    assert first_look(0.9) == 5
    assert interval([0.1] * 5, LOOKS, LEVEL) == (-math.inf, math.inf)
    assert interval([0.0] * 6, LOOKS, LEVEL) == (0.0, 0.0)


def test_no_number_of_looks_asks_for_more_than_ville():
    assert bound(20, 0.95) < bound(60, 0.95) <= math.log(20)
