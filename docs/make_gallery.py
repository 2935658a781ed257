"""The pictures of docs/examples.md, made anew: each example is run, and what came of it is drawn.

    python docs/make_gallery.py                    # all, some four minutes; writes docs/pictures
    python docs/make_gallery.py gan transfer       # some of them
    python docs/make_gallery.py --out FOLDER

Needs what the examples need: pip install 'torch-fitkit[examples,plot]'.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import fitkit
from fitkit.pictures import confusion_matrix

matplotlib.use("Agg")

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 4.0, 2.5  # inches
LIMIT = 30_000
"""Bytes of a picture."""


class Run:
    """An example that has run.

    Attributes:
        names: its global names.
        models: the model of each call of `fit`, in order.
        printed: what it printed.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        self.models: list[fitkit.Model] = []
        fit, argv, output = fitkit.Model.fit, sys.argv, io.StringIO()

        def recorded(model: fitkit.Model, *args: Any, **options: Any) -> Any:
            self.models.append(model)
            return fit(model, *args, **options)

        sys.argv = [name, *arguments]
        fitkit.Model.fit = recorded  # type: ignore[method-assign]
        try:
            with contextlib.redirect_stdout(output):
                self.names = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)
                if "main" in self.names and self.names["main"]():
                    raise RuntimeError(f"{name} failed:\n{output.getvalue()}")
        finally:
            fitkit.Model.fit, sys.argv = fit, argv  # type: ignore[method-assign]
        self.printed = output.getvalue()


def empty() -> tuple[Figure, Any]:
    """Return a figure and its only axes."""
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    return figure, figure.add_subplot()


def strip(rows: list[np.ndarray], titles: list[str]) -> Figure:
    """Rows of small images (N, 64), each row with its title."""
    figure = Figure((WIDTH, 0.75 * len(rows)), layout="constrained")
    for axes, images, title in zip(figure.subplots(len(rows), 1), rows, titles, strict=True):
        axes.imshow(np.hstack(images.reshape(-1, 8, 8)), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, fontsize=8, loc="left")
        axes.axis("off")
    return figure


def bars(shares: dict[str, float], label: str) -> Figure:
    """Return a bar for each share."""
    figure, axes = empty()
    found = axes.barh(list(shares), [100 * share for share in shares.values()], color="C0")
    axes.bar_label(found, fmt="%.1f %%", padding=3)
    axes.set(xlim=(0, 115), xlabel=label)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# ---------------------------------------------------------------------- one picture an example


def digits() -> Figure:
    """Which held-out digits are taken for which."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run("digits", "--out", folder)
    _, images, _, truth = run.names["load_data"]()
    guesses = run.models[0].predict(images, verbose=0).argmax(axis=1)
    return confusion_matrix(truth, guesses, size=(3.4, 3.2))


def mnist() -> Figure:
    """Learning curves of the convolutional net."""
    history = Run("mnist").names["history"]
    return history.plot(size=(6, 2.4))


def transfer() -> Figure:
    """Accuracy with and without the first task's weights."""
    found = re.findall(r"^(.+?) +([\d.]+)% right", Run("transfer").printed, re.MULTILINE)
    return bars({name: float(percent) / 100 for name, percent in found}, "of 1,747 images right, %")


def language_model() -> Figure:
    """Return what the transformer writes."""
    text = Run("language_model").printed.rpartition("bits a byte of held-out")[0]
    text = text[text.index("The following") :].strip()
    figure = Figure((WIDTH, 1.7), layout="constrained")
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 46)][:9]
    axes = figure.add_subplot()
    axes.text(0, 1, "\n".join(lines), family="monospace", fontsize=9.5, va="top")
    axes.axis("off")
    return figure


def resume_after_crash() -> Figure:
    """Return the losses of a training that was killed twice, and of one that wasn't."""
    command = [sys.executable, str(ROOT / "examples" / "resume_after_crash.py")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    whole, resumed = (
        [float(number) for number in re.search(rf"^{word} +losses (.+)$", printed, re.M)[1].split()]  # type: ignore[index]
        for word in ("whole", "resumed")
    )
    figure, axes = empty()
    epochs = range(1, len(whole) + 1)
    axes.plot(epochs, whole, "-", linewidth=5, alpha=0.35, label="never killed")
    axes.plot(epochs, resumed, "k--", linewidth=1.2, label="killed twice")
    axes.set(xlabel="epoch", ylabel="loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def autoencoder() -> Figure:
    """Held-out digits, and what comes back from eight numbers."""
    run = Run("autoencoder", "--verbose", "0")
    images = run.names["load_images"]()[1][:10]
    with torch.no_grad():
        restored = run.models[0](images).clamp(0, 1)
    return strip([images.numpy(), restored.numpy()], ["64 pixels", "restored from 8 numbers"])


def gan() -> Figure:
    """Return what the generator draws."""
    run = Run("gan")
    fitkit.set_seed(1)
    noise = torch.randn(20, run.names["NOISE_SIZE"])
    drawn = run.models[0].predict(noise, verbose=0)
    real = run.names["load_digits"]().data[:10] / 16
    return strip([real, drawn[:10], drawn[10:]], ["real", "drawn", ""])


def contrastive() -> Figure:
    """Return the embeddings on a plane, coloured by the digit that the net was never told."""
    from sklearn.manifold import TSNE

    run = Run("contrastive")
    data = run.names["load_digits"]()
    images = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    with torch.no_grad():
        places = TSNE(random_state=0).fit_transform(run.models[0].eval()(images).numpy())
    figure, axes = empty()
    axes.scatter(*places.T, c=data.target, cmap="tab10", s=1.5, linewidths=0)
    axes.axis("off")
    return figure


PICTURES: list[Callable[[], Figure]] = [
    digits,
    mnist,
    language_model,
    transfer,
    autoencoder,
    gan,
    contrastive,
    resume_after_crash,
]


def main() -> int:
    names = [draw.__name__ for draw in PICTURES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", nargs="*", metavar="example", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    given = parser.parse_args()
    unknown = [name for name in given.examples if name not in names]
    if unknown:
        parser.error(f"no picture of {', '.join(unknown)}; there are {', '.join(names)}")
    given.out.mkdir(parents=True, exist_ok=True)
    too_large = 0
    for draw in PICTURES:
        if given.examples and draw.__name__ not in given.examples:
            continue
        path = given.out / f"{draw.__name__}.png"
        draw().savefig(path, dpi=100)
        # A palette: a third of the bytes, and nobody sees it.
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
        size = path.stat().st_size
        too_large += size > LIMIT
        print(f"{path}  {size / 1000:.0f} kB", flush=True)
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main())
