"""A step of a Keras network by fitkit, and by Keras's own fit: the time and the numbers.

    KERAS_BACKEND=torch python benchmarks/keras_nets.py    # on CPU, about a minute

The same network trains both ways, in turns in one process. The ratios are those of the fits' times;
the differences are the largest of the weights after three epochs, and of the three epochs' logs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

import fitkit

os.environ.setdefault("KERAS_BACKEND", "torch")

ROWS, BATCH = 1024, 32


def nets() -> dict[str, tuple[Any, Any, Any]]:
    """Return what makes each network, its inputs and its targets, by name."""
    import keras
    from keras import layers as kl

    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, 32)).astype("float32")
    images = rng.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    tokens = rng.integers(1, 50, size=(ROWS, 12))
    tokens[:, 9:] = 0

    y = rng.normal(size=(ROWS, 1)).astype("float32")
    each = rng.normal(size=(ROWS, 12, 1)).astype("float32")
    pair = [table, table[::-1].copy()]

    def of(*layers: Any) -> Any:
        return lambda: keras.Sequential([*(make() for make in layers), kl.Dense(1)])

    def dense(**options: Any) -> Any:
        return lambda: kl.Dense(64, **options)

    def two_inputs(shared: bool = False) -> Any:
        inputs = [keras.Input((32,)), keras.Input((32,))]
        first = kl.Dense(16)
        second = first if shared else kl.Dense(16)
        parts = [first(inputs[0]), second(inputs[1])]
        return keras.Model(inputs, kl.Dense(1)(kl.Concatenate()(parts)))

    def two_outputs() -> Any:
        inputs = keras.Input((32,))
        inner = kl.Dense(32, "relu")(inputs)
        return keras.Model(inputs, [kl.Dense(1, name="a")(inner), kl.Dense(1, name="b")(inner)])

    class Subclass(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = kl.Dense(64, "tanh"), kl.Dense(1)
            self.drop = kl.Dropout(0.3, seed=1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.last(self.drop(self.first(inputs), training=training))

    def frozen() -> Any:
        net = keras.Sequential([keras.Input((32,)), kl.Dense(64), kl.Dense(1)])
        net.layers[0].trainable = False
        return net

    norm = kl.BatchNormalization
    embedded = partial(kl.Embedding, 50, 8)
    return {
        "dense": (of(dense(activation="relu"), dense(activation="relu")), table, y),
        "regularizers": (of(dense(kernel_regularizer="l2", activity_regularizer="l1")), table, y),
        "constraint": (of(dense(kernel_constraint=keras.constraints.MaxNorm(0.5))), table, y),
        "batch normalization": (of(dense(use_bias=False), norm, kl.ReLU), table, y),
        "dropout": (of(dense(), lambda: kl.Dropout(0.3, seed=1)), table, y),
        "layer normalization": (of(dense(), kl.LayerNormalization), table, y),
        "convolutions": (
            of(lambda: kl.Conv2D(16, 3, activation="tanh"), norm, kl.GlobalAveragePooling2D),
            images, y,
        ),
        "augmentation": (
            of(lambda: kl.RandomFlip(seed=5), lambda: kl.Conv2D(8, 3), kl.Flatten), images, y
        ),
        "LSTM, masked": (of(partial(embedded, mask_zero=True), lambda: kl.LSTM(8)), tokens, y),
        "GRU": (of(embedded, lambda: kl.GRU(8)), tokens, y),
        "masked steps": (of(partial(embedded, mask_zero=True), lambda: kl.Dense(8)), tokens, each),
        "two inputs": (two_inputs, pair, y),
        "shared layer": (partial(two_inputs, shared=True), pair, y),
        "two outputs": (two_outputs, table, [y, y]),
        "subclass": (Subclass, table, y),
        "frozen layer": (frozen, table, y),
    }  # fmt: skip


def main() -> None:
    import keras

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    pairs = parser.parse_args().pairs
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    print("| network | step ÷ Keras's | Keras's, ms | weights | logs |\n|---|---|---|---|---|")
    for name, (make, x, y) in nets().items():
        found, trained, histories = [], [], []
        for by_keras in (True, False):
            keras.utils.set_random_seed(0)
            net = make()
            model = net if by_keras else fitkit.Model(net)
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
            histories.append(model.fit(x, y, epochs=3, **settings).history)
            trained.append(model)
            found.append(net)
        weights = zip(found[0].variables, found[1].variables, strict=True)
        apart = max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in weights)
        logs = max(
            float(np.abs(np.subtract(v, histories[1][k])).max()) for k, v in histories[0].items()
        )
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
        print(f"| {name} | {ratio:.2f} | {step:.2f} | {apart:.0e} | {logs:.0e} |", flush=True)


if __name__ == "__main__":
    main()
