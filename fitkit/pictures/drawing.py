"""The figure and file that a picture is drawn to, and its colours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, missing_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#6E6E6E"
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


@contextmanager
def style() -> Iterator[None]:
    """Use the look of fitkit's pictures within the block. Then restore matplotlib's settings."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def check_matplotlib(purpose: str) -> None:
    """Check that matplotlib is installed.

    Raises:
        MissingPackageError: it isn't.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing_package("matplotlib", "plot", purpose) from None


def new_figure(size: tuple[float, float]) -> Figure:
    """A figure of that size (width and height in inches) that pyplot doesn't know."""
    from fitkit.pictures.picture import Picture

    return Picture(figsize=size, dpi=110)


def save(figure: Figure, path: str | os.PathLike[str] | None) -> None:
    """Write a figure to a file. The suffix sets the format."""
    if path is not None:
        figure.savefig(path, facecolor="white")


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


def one_place(figure: Any, axes: Any, size: tuple[float, float]) -> tuple[Any, Any]:
    """The figure and axes for a picture with one part: the given ones, or new ones."""
    if axes is not None:
        return root_figure(axes), axes
    figure = figure or new_figure(size)
    return figure, figure.add_subplot()


def root_figure(axes: Any) -> Any:
    """The top-level figure that contains the axes."""
    return axes.get_figure(root=True)
