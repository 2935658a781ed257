"""How often `fitkit.tune.compare` is wrong, how many seeds it takes, what pairs and workers save.

    python -m benchmarks.pairs            # some seconds
    python -m benchmarks.pairs --real     # also real trainings: pairs, and two workers beside one

Simulated: 40 pairs at a time, 20 without a difference and 20 with one of 1, 1.5, 2 or 3 standard
deviations, many times over; a look after each of 20 seeds; the noise of both models is Gaussian,
exponential, log-normal, or drawn from the accuracies of real runs on digits. A t-test with a fixed
number of seeds, which has the same power, is what it is measured beside.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import fitkit
from fitkit.extras.trials.sequential import interval

LOOKS, LEVEL, PRACTICAL = 20, 0.95, 1.0
EFFECTS = (1.0, 1.5, 2.0, 3.0)
DIGITS = [
    0.9472, 0.9500, 0.9417, 0.9472, 0.9444, 0.9361, 0.9528, 0.9444, 0.9500, 0.9389,
    0.9417, 0.9556, 0.9472, 0.9389, 0.9500, 0.9444, 0.9472, 0.9528, 0.9417, 0.9444,
]  # fmt: skip
"""Accuracies on 360 digits, of one net with 20 seeds."""

NOISES = {
    "gaussian": lambda numbers, shape: numbers.normal(size=shape),
    "exponential": lambda numbers, shape: numbers.exponential(size=shape),
    "log-normal": lambda numbers, shape: numbers.lognormal(size=shape),
    "digits": lambda numbers, shape: numbers.choice(DIGITS, shape),
}


def ended(differences: np.ndarray, practical: float = 0.0) -> tuple[int, int]:
    """Return after how many seeds the runs end, and the sign of the verdict."""
    for count in range(1, LOOKS + 1):
        low, high = interval(differences[:count].tolist(), LOOKS, LEVEL)
        if -practical < low <= high < practical:
            return count, 0
        if low > 0 or high < 0:
            return count, 1 if low > 0 else -1
    return LOOKS, 0


def simulated(noise: str, times: int) -> str:
    """Return a line on many times 40 pairs with this noise."""
    numbers = np.random.default_rng(1)
    nulls: list[tuple[int, int]] = []
    real: dict[float, list[tuple[int, int]]] = {effect: [] for effect in EFFECTS}
    fixed: dict[float, list[np.ndarray]] = {effect: [] for effect in EFFECTS}
    spread = float((NOISES[noise](numbers, 10**5) - NOISES[noise](numbers, 10**5)).std())
    for _ in range(times):
        pairs = NOISES[noise](numbers, (2, 40, LOOKS + 40))
        differences = (pairs[1] - pairs[0]) / spread
        nulls += [ended(row[:LOOKS], PRACTICAL) for row in differences[:20]]
        for number, row in enumerate(differences[20:]):
            effect = EFFECTS[number % len(EFFECTS)]
            real[effect].append(ended(row[:LOOKS] + effect, PRACTICAL))
            fixed[effect].append(row + effect)
    wrong = np.mean([sign != 0 for _, sign in nulls])
    found = [one for effect in EFFECTS for one in real[effect]]
    power, seeds = np.mean([sign > 0 for _, sign in found]), np.mean([n for n, _ in found])
    needed = fixed_seeds(
        np.concatenate([np.array(fixed[effect]) for effect in EFFECTS]), float(power)
    )
    return (
        f"{noise:12} false verdicts {100 * wrong:4.1f} %   power {100 * power:5.1f} %   seeds "
        f"{seeds:4.1f} of {needed} fixed = {seeds / needed:.2f}   without a difference "
        f"{np.mean([n for n, _ in nulls]):4.1f} seeds"
    )


def fixed_seeds(differences: np.ndarray, power: float) -> int:
    """Return with how many seeds a t-test has this power on these differences."""
    from scipy import stats

    for count in range(2, differences.shape[1]):
        first = differences[:, :count]
        errors = np.maximum(first.std(1, ddof=1), 1e-12) / math.sqrt(count)
        reached = first.mean(1) / errors > stats.t.ppf(1 - (1 - LEVEL) / 2, count - 1)
        if reached.mean() >= power:
            return count
    return differences.shape[1]


X, Y = load_digits(return_X_y=True)
X = (X / 16).astype("float32")


def build(width: int = 64, rate: float = 0.005) -> fitkit.Model:
    model = fitkit.Model(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)))
    model.compile(
        "adam", "cross_entropy", metrics=["accuracy"], learning_rate=rate, accelerator="cpu"
    )
    return model


def trained() -> None:
    """Print what real trainings on digits come to."""
    options: dict[str, Any] = {
        "metric": "val_accuracy", "epochs": 5, "batch_size": 64, "validation_split": 0.25,
        "verbose": 0,
    }  # fmt: skip
    mixed = np.ascontiguousarray(X[:, np.random.default_rng(0).permutation(64)])
    better = fitkit.tune.compare(
        {"16": lambda: build(16), "64": build}, X, Y, practical=0.01, **options
    )
    null = fitkit.tune.compare(
        {"rows": build, "mixed": lambda: (build(), {"x": mixed})}, X, Y, practical=0.01, **options
    )
    print(f"a better one: {better}\nnone: {null}")
    rates = {"a": build, "b": lambda: build(rate=0.0055)}
    pairs = fitkit.tune.compare(rates, X, Y, practical=1e-9, **options)
    a, b = (np.array(values) for values in pairs.runs.values())
    ratio = (b - a).var(ddof=1) / (a.var(ddof=1) + b.var(ddof=1))
    print(f"two rates: variance of the difference {ratio:.2f} of that of unpaired runs")
    seconds = {}
    for workers in (1, 2):
        begun = time.perf_counter()
        fitkit.tune.compare(
            {"a": build, "b": build}, X, Y, workers=workers, **{**options, "epochs": 30}
        )
        seconds[workers] = time.perf_counter() - begun
    print(
        f"40 runs: {seconds[1]:.0f} s one after the other, {seconds[2]:.0f} s two at once: "
        f"{seconds[2] / seconds[1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=25, help="times 40 pairs of each noise (25)")
    parser.add_argument("--real", action="store_true", help="train on digits, too")
    arguments = parser.parse_args()
    for noise in NOISES:
        print(simulated(noise, arguments.times), flush=True)
    if arguments.real:
        trained()


if __name__ == "__main__":
    main()
