"""Handwritten digits: train a small convolutional network, check it, save it, load it again.

    python examples/digits.py                  # or: make demo
    python examples/digits.py --epochs 3       # fewer passes over the data

The 1,797 images (8 x 8 pixels) come with scikit-learn, so nothing is downloaded. The curves and the
weights are written to runs/digits; the exit status is 1 where the net did not learn. The net trains
on the accelerator that torch finds, if any. Then the same training is done by two processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import fitkit

WANTED_ACCURACY = 0.97


def build_net() -> nn.Module:
    """Return a plain PyTorch network: images of shape (B, 1, 8, 8) in, ten logits out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),  # (B, 32, 8, 8)
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),  # (B, 64, 8, 8)
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (B, 64, 4, 4)
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images scaled to 0..1 and their digits: training and held-out test."""
    digits = load_digits()
    images = digits.images[:, None] / 16.0  # (1797, 1, 8, 8), float64: fit converts
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    return x_train, x_test, y_train, y_test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="where files go")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    x_train, x_test, y_train, y_test = load_data()

    fitkit.set_seed(0)
    model = fitkit.Model(build_net())
    model.summary(x_train[:1])
    model.compile(optimizer="adam", loss="cross_entropy", metrics=["accuracy"])

    started = time.perf_counter()
    history = model.fit(
        x_train, y_train, batch_size=32, epochs=arguments.epochs, validation_split=0.1
    )
    seconds = time.perf_counter() - started

    # The test images were in neither the training nor the validation part.
    result = model.evaluate(x_test, y_test, return_dict=True)
    logits = model.predict(x_test)  # (360, 10)

    weights = arguments.out / "digits.h5"
    model.save_weights(weights)
    restored = fitkit.Model(build_net())
    restored.load_weights(weights)
    if not np.array_equal(restored.predict(x_test), logits):
        print(f"{weights} was loaded, but predicts otherwise than the trained net", file=sys.stderr)
        return 1

    # The same training on two processes: each takes half of every batch.
    fitkit.set_seed(0)
    pair = fitkit.Model(build_net())
    pair.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu", devices=2)
    started = time.perf_counter()
    pair.fit(x_train, y_train, batch_size=16, epochs=arguments.epochs, validation_split=0.1)
    pair_seconds = time.perf_counter() - started
    pair_result = pair.evaluate(x_test, y_test, return_dict=True)

    curves = arguments.out / "curves.png"
    plot_curves(history, curves)
    print_results({"one process": (result, seconds), "two processes": (pair_result, pair_seconds)})
    print_mistakes(logits.argmax(axis=1), y_test)
    found = torch.accelerator.current_accelerator() or "none found by torch.accelerator"
    print(f"accelerator      {found}: the first net was trained on {model.device}")
    print(f"learning curves  {curves}")
    print(f"weights          {weights} (loaded into a new net: the same predictions)")

    for accuracy in (result["accuracy"], pair_result["accuracy"]):
        if accuracy <= WANTED_ACCURACY:
            print(
                f"held-out accuracy {accuracy:.2%} is not over {WANTED_ACCURACY:.0%}: "
                "train longer with --epochs",
                file=sys.stderr,
            )
            return 1
    return 0


def plot_curves(history: fitkit.callbacks.History, path: Path) -> None:
    """Loss and accuracy by epoch, training against validation, as a picture."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files, so it works without a screen
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    epochs = [epoch + 1 for epoch in history.epoch]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for panel, name in zip(panels, ["loss", "accuracy"], strict=True):
        panel.plot(epochs, history.history[name], "o-", markersize=4, label="training")
        panel.plot(epochs, history.history[f"val_{name}"], "s--", markersize=4, label="validation")
        panel.set(title=name.capitalize(), xlabel="epoch", ylabel=name)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend()
    panels[0].set(ylabel="cross-entropy (logarithmic)", yscale="log")
    panels[1].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    figure.suptitle("Handwritten digits: a small convolutional net")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def print_results(runs: dict[str, tuple[dict[str, float], float]]) -> None:
    """Print the final table: how each training did on the images that it never saw."""
    table = Table("trained on", "loss", "accuracy", "training time", title="Held-out test")
    for name, (result, seconds) in runs.items():
        table.add_row(
            name, f"{result['loss']:.4f}", f"{result['accuracy']:.2%}", f"{seconds:.1f} s"
        )
    Console().print(table)


def print_mistakes(predicted: np.ndarray, digits: np.ndarray) -> None:
    """Which digits the first net mistook."""
    mistaken = predicted != digits
    table = Table("digit", *map(str, range(10)), title="Mistakes by digit")
    table.add_row("mistakes", *(str(mistaken[digits == digit].sum()) for digit in range(10)))
    table.add_row("images", *(str((digits == digit).sum()) for digit in range(10)))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
