"""The figure and file that a picture is drawn to, and its colours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, missing_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = "#0072B2", "#D55E00"
"""Distinct to the colour-blind, too. Reference: Okabe and Ito, Color Universal Design, 2008."""

STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.edgecolor": "#B0B0B0",
    "axes.labelcolor": "#404040",
    "xtick.color": "#606060",
    "ytick.color": "#606060",
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 6),
}


LEGEND: dict[str, Any] = {
    "frameon": False, "fontsize": 8, "labelcolor": "#404040", "handlelength": 2.4,
}  # fmt: skip


@contextmanager
def style(purpose: str) -> Iterator[None]:
    """Use the look of fitkit's pictures within the block. Then restore matplotlib's settings.

    Args:
        purpose: what needs matplotlib, for the message.

    Raises:
        MissingPackageError: matplotlib isn't installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_package("matplotlib", "plot", purpose) from None
    with matplotlib.rc_context(STYLE):
        yield


@contextmanager
def one_panel(
    purpose: str,
    size: tuple[float, float],
    *,
    figure: Any,
    axes: Any,
    path: str | os.PathLike[str] | None,
) -> Iterator[tuple[Figure, Axes]]:
    """Give the figure and axes for a picture with one part: the given ones, or new ones of that
    size.

    At the end of the block, the figure is written to `path`.

    Raises:
        MissingPackageError, ArgumentTypeError: as `style` and `check_place`.
    """
    with style(purpose):
        check_place(figure, axes, path)
        if axes is not None:
            figure = axes.get_figure(root=True)
        else:
            figure = figure or new_figure(size)
            axes = figure.add_subplot()
        yield figure, axes
        save(figure, path)


def new_figure(size: tuple[float, float]) -> Figure:
    """Return a figure of that size (width and height in inches) that pyplot doesn't know."""
    from fitkit.extras.pictures.picture import Picture

    return Picture(figsize=size, dpi=110)


def save(figure: Figure, path: str | os.PathLike[str] | None) -> None:
    """Write a figure to a file. The suffix sets the format."""
    if path is not None:
        figure.savefig(path, facecolor="white")


def dress(axes: Axes, title: str) -> None:
    """Give the axes of a curve a title on the left, and thin horizontal lines."""
    axes.set_title(title, loc="left", color="#202020")
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def mark(axes: Axes, x: float, y: float, title: str, **options: Any) -> None:
    """Mark one point of a curve, and say on the right above what it is."""
    axes.plot(
        [x], [y], "D", color=ORANGE, markersize=6, markeredgecolor="white", linestyle="none",
        zorder=4, **options,
    )  # fmt: skip
    axes.set_title(title, loc="right", color=ORANGE, fontsize="small")


def check_place(figure: object, axes: object, path: object) -> None:
    """Refuse a wrong figure, axes or path.

    Raises:
        ArgumentTypeError: one has a wrong type, or both a figure and axes are given.
    """
    if figure is not None and axes is not None:
        raise ArgumentTypeError("Give a figure or axes, not both.")
    if figure is not None and not hasattr(figure, "add_subplot"):
        raise ArgumentTypeError(f"figure={describe(figure)} must be a matplotlib Figure.")
    listed = axes if isinstance(axes, (list, tuple)) else [axes]
    if axes is not None and not all(hasattr(one, "plot") for one in listed):
        raise ArgumentTypeError(f"axes={describe(axes)} must be matplotlib Axes.")
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path={describe(path)} must be a path.")
