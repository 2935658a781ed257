"""Handwritten digits: train a small convolutional network, check it, save it, load it again.

    python examples/digits.py                  # or: make demo
    python examples/digits.py --epochs 3       # fewer passes over the data

The 1,797 images (8 x 8 pixels) come with scikit-learn, so nothing is downloaded. The curves and the
weights are written to runs/digits; the exit status is 1 where the net did not learn.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import fitkit

WANTED_ACCURACY = 0.97


def build_net() -> nn.Module:
    """A plain PyTorch network: images of shape (B, 1, 8, 8) in, ten logits out."""
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

    fitkit.set_seed(0)
    x_train, x_test, y_train, y_test = load_data()

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

    curves = arguments.out / "curves.png"
    plot_curves(history, curves)
    print_results(result, logits.argmax(axis=1), y_test, seconds)
    print(f"learning curves  {curves}")
    print(f"weights          {weights} (loaded into a new net: the same predictions)")

    if result["accuracy"] <= WANTED_ACCURACY:
        print(
            f"held-out accuracy {result['accuracy']:.2%} is not over {WANTED_ACCURACY:.0%}: "
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


def print_results(
    result: dict[str, float], predicted: np.ndarray, digits: np.ndarray, seconds: float
) -> None:
    """The final tables: the whole test set, then the mistakes digit by digit."""
    mistaken = predicted != digits
    overall = Table("loss", "accuracy", "mistakes", "training time", title="Held-out test")
    overall.add_row(
        f"{result['loss']:.4f}",
        f"{result['accuracy']:.2%}",
        f"{mistaken.sum()} of {len(digits)}",
        f"{seconds:.1f} s",
    )
    by_digit = Table("digit", *map(str, range(10)), title="Mistakes by digit")
    by_digit.add_row("mistakes", *(str(mistaken[digits == digit].sum()) for digit in range(10)))
    by_digit.add_row("images", *(str((digits == digit).sum()) for digit in range(10)))

    console = Console()
    console.print(overall)
    console.print(by_digit)


if __name__ == "__main__":
    sys.exit(main())
