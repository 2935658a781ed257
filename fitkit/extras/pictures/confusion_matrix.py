"""The confusion matrix: its counts and its picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fitkit.arguments import check_choice, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.pictures.drawing import one_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]

LONGEST_NAME = 24
"""The most characters of a class's name. Longer names are shortened in the middle."""

LARGEST = 40.0
"""The longest side in inches. With hundreds of classes cells get small, and only some are named."""

WITH_UNIT = 12
"""The most classes for which a cell has room for a percent sign."""

SHARE_OF = {"true": "true class", "pred": "predicted class", "all": "all samples"}
"""What `normalize` divides by."""


def confusion_counts(y_true: Any, y_pred: Any, labels: Any = None) -> tuple[Array, list[str]]:
    """Count how often each true class was predicted as each class.

    Args:
        y_true: the targets: (N,) class numbers or names, or one-hot rows (N, C).
        y_pred: the predictions: (N,) classes, or (N, C) scores, of which the largest counts.
        labels: the classes' names by number. If the targets are names themselves, the names in the
            order to show. None: the classes that occur, sorted.

    Returns:
        Counts of shape (C, C), with true classes in rows and predicted ones in columns, and the
        classes' names.

    Example:
        >>> import fitkit
        >>> counts, names = fitkit.pictures.confusion_counts([0, 1, 1], [0, 1, 0])
        >>> counts.tolist(), names
        ([[1, 0], [1, 1]], ['0', '1'])

    Raises:
        ConfigurationError, ArgumentTypeError: the targets and predictions can't be compared.
    """
    true, predicted = _classes(y_true, "y_true"), _classes(y_pred, "y_pred")
    if len(true) != len(predicted):
        raise ConfigurationError(
            f"y_true has {len(true)} samples and y_pred {len(predicted)}; they must be the same."
        )
    if not len(true):
        raise ConfigurationError("y_true and y_pred are empty: there is nothing to count.")
    classes, names = _named(true, predicted, labels)
    place = {value: index for index, value in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
    rows = [place[value] for value in true.tolist()]
    columns = [place[value] for value in predicted.tolist()]
    np.add.at(counts, (rows, columns), 1)
    return counts, names


def confusion_matrix(
    y_true: Any,
    y_pred: Any,
    labels: Any = None,
    normalize: str | None = None,
    *,
    figure: Any = None,
    axes: Any = None,
    size: tuple[float, float] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw a confusion matrix, with true classes in rows and predicted ones in columns.

    The colour is the share of the true class (or of what `normalize` says), so that rare classes
    are as visible as frequent ones.

    Args:
        y_true, y_pred, labels: as in `confusion_counts`, which returns the numbers.
        normalize: what the cells show. None: counts. `"true"`: percent of the row's true class.
            `"pred"`: percent of the column's predicted class. `"all"`: percent of all samples.
        figure, axes: matplotlib objects to draw in. None makes a new figure that pyplot doesn't
            manage.
        size: width and height of the new figure in inches. None: fits the number of classes.
        path: a file to write as well: `.png`, `.svg`, `.pdf`, ….

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib isn't installed.
        ConfigurationError, ArgumentTypeError: the values can't be compared or drawn.

    Example:
        >>> import fitkit
        >>> figure = fitkit.pictures.confusion_matrix([0, 1, 1], [0, 1, 0], ["cat", "dog"])
    """
    normalize = check_choice("normalize", normalize, (None, "true", "pred", "all"))
    counts, names = confusion_counts(y_true, y_pred, labels)
    names = [_shortened(name) for name in names]
    panel = one_panel(
        "confusion_matrix()", size or _size(names), figure=figure, axes=axes, path=path
    )
    with panel as (drawn, place):
        _draw(drawn, place, counts, names, normalize)
    return drawn


# ------------------------------------------------------------------ the numbers


def _classes(values: Any, name: str) -> Array:
    """Classes as a vector of whole numbers or strings."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    found = np.asarray(values)
    if found.dtype == object:
        found = np.asarray([str(value) for value in found.ravel()]).reshape(found.shape)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim == 2 and found.dtype.kind in "fiub":
        return np.asarray(found.argmax(axis=1))
    if found.ndim != 1 or found.dtype.kind not in "fiubSU":
        raise ArgumentTypeError(
            f"{name}={describe(values)} must have a class for each sample, (N,), or a score for "
            "each class, (N, C)."
        )
    if found.dtype.kind == "f":
        whole = found.astype(np.int64, copy=True) if np.isfinite(found).all() else None
        if whole is None or not (whole == found).all():
            raise ConfigurationError(
                f"{name} has numbers that aren't whole, which aren't classes. Scores of two "
                f"classes become classes by a threshold: ({name} > 0.5).astype(int) for "
                "probabilities, > 0 for logits."
            )
        return whole
    return found.astype(np.int64) if found.dtype.kind in "iub" else found.astype(str)


def _named(true: Array, predicted: Array, labels: Any) -> tuple[list[Any], list[str]]:
    """Return the classes in order, and their names."""
    occurring = sorted({*true.tolist(), *predicted.tolist()}, key=lambda v: (isinstance(v, str), v))
    if len({type(value) for value in occurring}) > 1:
        raise ConfigurationError(
            "y_true and y_pred must both have numbers or both have names; one has "
            f"{describe(true[:3].tolist())}, the other {describe(predicted[:3].tolist())}."
        )
    if labels is None:
        return occurring, [str(value) for value in occurring]
    if isinstance(labels, str) or not isinstance(labels, (Sequence, np.ndarray)):
        raise ArgumentTypeError(f"labels={describe(labels)} must be a list of the classes' names.")
    names = [str(label) for label in labels]
    if isinstance(occurring[0], str):
        absent = [value for value in occurring if value not in names]
        classes: list[Any] = names
    else:
        absent = [value for value in occurring if not 0 <= value < len(names)]
        classes = list(range(len(names)))
    if absent:
        raise ConfigurationError(
            f"labels has {len(names)} classes, without {', '.join(map(str, absent[:5]))}, which "
            "occurs. Name all classes."
        )
    if len(set(names)) < len(names) and isinstance(occurring[0], str):
        raise ConfigurationError("labels has a name twice.")
    return classes, names


def _shares(counts: Array, normalize: str) -> Array:
    """Return the counts as shares. A class without samples gets 0."""
    axis = {"true": 1, "pred": 0, "all": None}[normalize]
    whole = counts.sum(axis=axis, keepdims=axis is not None)
    shares: Array = counts / np.maximum(whole, 1)
    return shares


# ------------------------------------------------------------------ the picture


def _shortened(name: str) -> str:
    name = " ".join(name.split())
    if len(name) <= LONGEST_NAME:
        return name
    half = (LONGEST_NAME - 1) // 2
    return f"{name[: half + 1].rstrip()}…{name[-half:].lstrip()}"


def _cell_inches(classes: int) -> float:
    return float(min(np.clip(6.5 / classes, 0.34, 0.85), LARGEST / classes))


def _size(names: list[str]) -> tuple[float, float]:
    inches = max(1.6, _cell_inches(len(names)) * len(names))
    longest = 0.075 * max(map(len, names))
    upright = longest if _turns(names) else 0.2
    return inches + longest + 1.3, inches + upright + 0.5


def _turns(names: list[str]) -> bool:
    """Whether the names below the columns are too long to stand side by side."""
    return max(map(len, names)) * 0.08 > _cell_inches(len(names))


def _draw(figure: Any, axes: Axes, counts: Array, names: list[str], normalize: str | None) -> None:
    classes = len(names)
    shares = _shares(counts, normalize or "true")
    top = 1.0 if normalize != "all" else max(float(shares.max()), 1e-9)
    # Not "equal": the layout would leave no room for long names. The new figure's size suits.
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=top, aspect="auto")
    bar = figure.colorbar(image, ax=axes, fraction=0.06, pad=0.03, format=_percent)
    bar.set_label(f"share of {'the ' * (normalize != 'all')}{SHARE_OF[normalize or 'true']}")
    bar.outline.set_visible(False)
    named = range(0, classes, math.ceil(0.15 / _cell_inches(classes)))
    shown = [names[place] for place in named]
    axes.set_xticks(named, shown, rotation=90 if _turns(names) else 0)
    axes.set_yticks(named, shown)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # White lines between the cells.
    axes.set_xticks(np.arange(classes - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(classes - 1) + 0.5, minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color="white", linewidth=1)
    _write_numbers(axes, counts, shares, top, normalize)


def _write_numbers(
    axes: Axes, counts: Array, shares: Array, top: float, normalize: str | None
) -> None:
    classes = len(counts)
    unit = "%" if classes <= WITH_UNIT else ""
    texts = [
        [
            _text(count, share, unit if normalize else None)
            for count, share in zip(*row, strict=True)
        ]
        for row in zip(counts, shares, strict=True)
    ]
    longest = max(len(text) for row in texts for text in row)
    points = 72 * _cell_inches(classes)
    font = min(10.0, 0.85 * points / (0.62 * longest))
    if font < 4.5:
        return  # colours only: nobody could read the numbers
    for row, column in np.argwhere(counts).tolist():
        dark = shares[row, column] > 0.55 * top
        axes.text(
                column, row, texts[row][column], ha="center", va="center", fontsize=font,
                color="white" if dark else "#303030",
            )  # fmt: skip


def _text(count: int, share: float, unit: str | None) -> str:
    """Return a cell's text: the count, or percent if there is a unit. Cells with 0 get none."""
    if unit is None:
        return f"{count}"
    return f"{100 * share:.0f}{unit}" if share >= 0.005 else "·"


def _percent(share: float, _position: Any = None) -> str:
    percent = 100 * share
    return f"{percent:.0f}%" if percent >= 1 or not percent else f"{percent:.1g}%"
