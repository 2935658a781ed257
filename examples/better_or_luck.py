"""Is a change better, or was it luck? Two pairs of nets, trained on digits with several seeds.

    python examples/better_or_luck.py

The 1,797 images of digits come with scikit-learn. A net of 64 units is compared with one of 16,
which it beats. Then it is compared with one whose pixels come in another order: that changes each
run, but no net of this kind can be better for it. The exit status is 1 where the first pair isn't
settled, or the second has a winner.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import fitkit


def build(width: int) -> fitkit.Model:
    """Return a compiled model with one hidden layer."""
    model = fitkit.Model(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], learning_rate=0.005)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare nets over seeds.")
    parser.add_argument("--seeds", type=int, default=20, help="the most seeds (20)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data (5)")
    arguments = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")  # (N, 64)
    mixed = np.ascontiguousarray(x[:, np.random.default_rng(0).permutation(64)])
    pairs: dict[str, dict[str, Callable[[], Any]]] = {
        "Four times as wide": {"16 units": lambda: build(16), "64 units": lambda: build(64)},
        "Pixels in another order": {
            "in rows": lambda: build(64),
            "mixed": lambda: (build(64), {"x": mixed}),
        },
    }
    found = {}
    for title, builders in pairs.items():
        print(title)
        found[title] = fitkit.tune.compare(
            builders,
            x,
            y,
            metric="val_accuracy",
            seeds=arguments.seeds,
            practical=0.01,
            epochs=arguments.epochs,
            batch_size=64,
            validation_split=0.25,
        )
    wider, luck = found.values()
    return int(wider.better != "64 units" or luck.better is not None)


if __name__ == "__main__":
    sys.exit(main())
