"""A step of a Keras network by fitkit, and by Keras's own fit: the time and the numbers.

    KERAS_BACKEND=torch python benchmarks/keras_nets.py    # on CPU, about a minute

The same network trains both ways, in turns in one process. The ratios are those of the fits' times;
the differences are the largest of the weights after three epochs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np

import fitkit

os.environ.setdefault("KERAS_BACKEND", "torch")

ROWS, BATCH = 2048, 32


def nets() -> dict[str, tuple[Any, Any]]:
    """Return what makes each network, and its inputs, by name."""
    import keras
    from keras import layers as kl

    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, 32)).astype("float32")
    images = rng.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    tokens = rng.integers(1, 50, size=(ROWS, 12))
    tokens[:, 9:] = 0

    def of(*layers: Any) -> Any:
        return lambda: keras.Sequential([*(make() for make in layers), kl.Dense(1)])

    return {
        "dense": (of(lambda: kl.Dense(64, "relu"), lambda: kl.Dense(64, "relu")), table),
        "regularizers, batch normalization, dropout": (
            of(
                lambda: kl.Dense(64, use_bias=False, kernel_regularizer="l2"),
                kl.BatchNormalization,
                lambda: kl.Dropout(0.3, seed=1),
            ),
            table,
        ),
        "convolutions": (
            of(lambda: kl.Conv2D(16, 3, activation="tanh"), kl.GlobalAveragePooling2D), images
        ),
        "masked LSTM": (
            of(lambda: kl.Embedding(50, 8, mask_zero=True), lambda: kl.LSTM(8)), tokens
        ),
    }  # fmt: skip


def main() -> None:
    import keras

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    y = np.random.default_rng(1).normal(size=(ROWS, 1)).astype("float32")
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    print("| network | step ÷ Keras's | Keras's, ms | largest difference |\n|---|---|---|---|")
    for name, (make, x) in nets().items():
        found, trained = [], []
        for by_keras in (True, False):
            keras.utils.set_random_seed(0)
            net = make()
            model = net if by_keras else fitkit.Model(net)
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
            model.fit(x, y, epochs=3, **settings)
            trained.append(model)
            found.append(net)
        weights = zip(found[0].variables, found[1].variables, strict=True)
        apart = max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in weights)
        seconds: list[tuple[float, ...]] = []
        for _ in range(pairs):
            pair = []
            for model in trained:
                begin = time.perf_counter()
                model.fit(x, y, epochs=1, **settings)
                pair.append(time.perf_counter() - begin)
            seconds.append(tuple(pair))
        ratio = statistics.median(ours / theirs for theirs, ours in seconds)
        step = statistics.median(theirs for theirs, _ in seconds) / (ROWS / BATCH) * 1e3
        print(f"| {name} | {ratio:.2f} | {step:.2f} | {apart:.0e} |", flush=True)


if __name__ == "__main__":
    main()
