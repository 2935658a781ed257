"""The losses of a learning-rate range test over its rates."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fitkit.pictures.drawing import (
    BLUE,
    ORANGE,
    check_matplotlib,
    check_place,
    one_place,
    save,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEGINNING = 6
"""Updates whose losses say how high the picture has to reach."""


def rate_curve(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggested: int | None,
    *,
    figure: Any = None,
    axes: Any = None,
    size: tuple[float, float] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw losses over rising rates, and the suggested rate.

    Args:
        rates, losses, smoothed: one an update.
        suggested: the place of the suggested rate among them; None: there is none.
        figure, axes: matplotlib's, to draw in; None makes a figure that pyplot doesn't know.
        size: the new figure's width and height in inches.
        path: a file to write, too: `.png`, `.svg`, `.pdf`, ….

    Raises:
        MissingPackageError: matplotlib isn't installed.
        ArgumentTypeError: nothing to draw in or to write to.
    """
    check_matplotlib("RateRange.plot()")
    check_place(figure, axes, path)
    with style():
        figure, axes = one_place(figure, axes, size or (6.0, 3.4))
        _draw(axes, rates, losses, smoothed, suggested)
        save(figure, path)
    found: Figure = figure
    return found


def _draw(
    axes: Axes,
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggested: int | None,
) -> None:
    axes.plot(rates, losses, color=BLUE, linewidth=0.9, alpha=0.4, label="loss")
    axes.plot(rates, smoothed, color=BLUE, linewidth=1.6, label="smoothed")
    axes.set_title("loss", loc="left", color="#202020")
    if suggested is not None:
        rate = rates[suggested]
        axes.plot(
            [rate], [smoothed[suggested]], "D", color=ORANGE, markersize=6,
            markeredgecolor="white", linestyle="none", zorder=4, label="steepest fall",
        )  # fmt: skip
        axes.set_title(
            f"suggested learning rate {rate:.2g}", loc="right", color=ORANGE, fontsize="small"
        )
    axes.set_xscale("log")
    if len(rates) > 1:
        axes.set_xlim(rates[0], rates[-1])
    axes.set_ylim(*_bounds(smoothed))
    axes.set_xlabel("learning rate")
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, labelcolor="#404040", handlelength=2.4)


def _bounds(smoothed: Sequence[float]) -> tuple[float, float]:
    """The losses to show: a last one that explodes would flatten all others."""
    finite = [loss for loss in smoothed if math.isfinite(loss)]
    low = min(finite, default=0.0)
    begin = max(finite[:BEGINNING], default=1.0)
    margin = 0.1 * (begin - low) or 0.1 * abs(low) or 0.1
    return low - 2 * margin, begin + 5 * margin
