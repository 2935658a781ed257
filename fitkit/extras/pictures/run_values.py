"""Runs of several candidates: the value of each, joined by seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitkit.extras.pictures.drawing import BLUE, ORANGE, dress, one_panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_values(
    runs: Mapping[str, Sequence[float | None]],
    metric: str = "value",
    title: str = "",
    *,
    figure: Any = None,
    axes: Any = None,
    size: tuple[float, float] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw each candidate's runs as points, and its mean as a line. Pale lines join equal seeds.

    Args:
        runs: the values of each candidate, by name, one for each seed. None: no value.
        metric: what the values are.
        title: what stands above them.
        figure, axes: matplotlib objects to draw in. None makes a new figure that pyplot doesn't
            manage.
        size: width and height of the new figure in inches.
        path: a file to write as well: `.png`, `.svg`, `.pdf`, ….

    Returns:
        The figure.

    Example:
        >>> import fitkit
        >>> runs = {"now": [0.91, 0.93, 0.92], "wider": [0.94, 0.95, 0.94]}
        >>> figure = fitkit.pictures.run_values(runs, "val_accuracy")

    Raises:
        MissingPackageError: matplotlib isn't installed.
        ArgumentTypeError: `figure`, `axes` or `path` has a wrong type.
    """
    size = size or (6.0, 0.9 + 0.5 * len(runs))
    panel = one_panel("comparison.plot()", size, figure=figure, axes=axes, path=path)
    with panel as (drawn, place):
        dress(place, title)
        place.grid(visible=False, axis="y")
        place.grid(axis="x", color="#E6E6E6", linewidth=0.8)
        for of_seed in zip(*runs.values(), strict=True):
            known = [(value, row) for row, value in enumerate(of_seed) if value is not None]
            if len(known) > 1:
                place.plot(*zip(*known, strict=True), color="#B0B0B0", linewidth=0.7, alpha=0.6)
        for row, values in enumerate(runs.values()):
            found = [value for value in values if value is not None]
            place.plot(found, [row] * len(found), "o", color=BLUE, markersize=4, alpha=0.7)
            if found:
                mean = sum(found) / len(found)
                place.plot([mean, mean], [row - 0.3, row + 0.3], color=ORANGE, linewidth=2.0)
        place.set_yticks(range(len(runs)), list(runs))
        place.set_ylim(len(runs) - 0.5, -0.5)
        place.set_xlabel(metric)
    return drawn
