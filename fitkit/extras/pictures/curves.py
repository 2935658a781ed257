"""Curves: logs over the epochs, and the losses of a learning-rate range test over its rates."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.pictures.drawing import (
    BLUE,
    LEGEND,
    ORANGE,
    check_place,
    dress,
    mark,
    new_figure,
    one_panel,
    save,
    style,
)
from fitkit.registry import did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKED_EPOCHS = 30
"""Up to this many points, each is marked. More marks would run together."""

DASHED_EPOCHS = 100
"""Up to this many points, the training's curve is dashed. With more it is pale."""

LOG_RATIO = 100.0
"""The ratio of largest to smallest value above which losses and rates get a log scale."""

LONGEST_NAME = 18
"""The most characters of a name that fits beside the best value."""

VALIDATION = "val_"
LOST = "NaN or infinite"

COLORS = (ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The colours of the curves of several validation sets."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One log over the epochs.

    Attributes:
        epochs: from 1.
        values: one per epoch. They may include NaN and infinity.
    """

    epochs: list[int]
    values: list[float]

    def finite(self) -> list[tuple[int, float]]:
        """Return the epochs whose values can be drawn, with the values."""
        pairs = zip(self.epochs, self.values, strict=True)
        return [(epoch, value) for epoch, value in pairs if math.isfinite(value)]

    def best(self, direction: str | None) -> tuple[int, float] | None:
        """Return the epoch with the best value, and the value; None if that isn't known."""
        found = self.finite()
        if direction is None or not found:
            return None
        best = min if direction == "min" else max
        return best(found, key=lambda pair: pair[1])


def learning_curves(
    curves: Mapping[str, Curve],
    metrics: str | Sequence[str] | None = None,
    *,
    sets: Sequence[str] = (),
    directions: Mapping[str, str] | None = None,
    figure: Any = None,
    axes: Any = None,
    size: tuple[float, float] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw logs over the epochs, one panel each, with training and validation together.

    The best epoch (of the validation, if there is one) is marked if it is known which direction is
    better. Epochs that are NaN or infinite get a cross at the bottom of the panel.

    Args:
        curves: the logs by name. `val_loss` is drawn with `loss`.
        metrics: the logs to draw, without `val_`. None: all.
        sets: the names of validation sets, if there are several. `val_day_loss` of the set `day`
            is drawn with `loss`, too.
        directions: `"min"` or `"max"` by name, if known.
        figure: a figure to draw in. None makes a new one that pyplot doesn't manage.
        axes: instead of a figure, one Axes per metric.
        size: width and height of the new figure in inches. None: fits the number of panels.
        path: a file to write as well: `.png`, `.svg`, `.pdf`, ….

    Returns:
        The figure.

    Example:
        >>> import fitkit
        >>> from fitkit.extras.pictures.curves import Curve
        >>> curves = {"loss": Curve([1, 2, 3], [2.3, 0.9, 0.5])}
        >>> figure = fitkit.pictures.learning_curves(curves)

    Raises:
        MissingPackageError: matplotlib isn't installed.
        ConfigurationError, ArgumentTypeError: there is nothing to draw, or a name is unknown.
    """
    with style("history.plot()"):
        check_place(figure, axes, path)
        names = _chosen(curves, metrics, sets)
        if axes is not None:
            places = list(axes) if isinstance(axes, (list, tuple)) else [axes]
            if len(places) != len(names):
                raise ConfigurationError(
                    f"axes has {len(places)} and there are {len(names)} to draw: "
                    f"{', '.join(names)}. Choose by metrics=."
                )
            figure = places[0].get_figure(root=True)
        else:
            columns = _columns(len(names))
            rows = -(-len(names) // columns)
            if figure is None:
                figure = new_figure(size or (1.0 + 3.7 * columns, 0.5 + 2.6 * rows))
            places = [figure.add_subplot(rows, columns, n + 1) for n in range(len(names))]
        for place, name in zip(places, names, strict=True):
            _panel(place, name, curves, sets, (directions or {}).get(name))
        _explain(places)
        save(figure, path)
    found: Figure = figure
    return found


def _columns(panels: int) -> int:
    if panels <= 3:
        return panels
    return 2 if panels == 4 else 3 if panels <= 9 else 4


def _chosen(curves: Mapping[str, Curve], metrics: object, sets: Sequence[str]) -> list[str]:
    """Return the panels' names, in the logs' order."""
    known = list(dict.fromkeys(_base(name, curves, sets) for name in curves))
    if not known:
        raise ConfigurationError("There is nothing to draw: no epoch has ended.")
    if metrics is None:
        return known
    asked = [metrics] if isinstance(metrics, str) else metrics
    if not isinstance(asked, Sequence) or not all(isinstance(name, str) for name in asked):
        raise ArgumentTypeError(
            f"metrics={describe(metrics)} must be a name or a list of names, like ['loss']."
        )
    found = []
    for name in asked:
        base = name if name in known else _base(name, dict.fromkeys(known), sets)
        if base not in known:
            base = name.removeprefix(VALIDATION)
        if base not in known:
            raise ConfigurationError(
                f"metrics has {name!r}, which no epoch has.{did_you_mean(name, known)} There are: "
                f"{', '.join(known)}."
            )
        found.append(base)
    if not found:
        raise ConfigurationError(f"metrics is empty. There are: {', '.join(known)}.")
    return list(dict.fromkeys(found))


def _prefixes(sets: Sequence[str]) -> dict[str, str]:
    """How the names of a validation's values begin, and the labels of their curves."""
    return {**{f"{VALIDATION}{name}_": name for name in sets}, VALIDATION: "validation"}


def _base(name: str, curves: Mapping[str, object], sets: Sequence[str]) -> str:
    """Return the panel that a log belongs to."""
    for prefix in _prefixes(sets):
        if name.startswith(prefix) and name.removeprefix(prefix) in curves:
            return name.removeprefix(prefix)
    return name


def _panel(
    axes: Axes,
    name: str,
    curves: Mapping[str, Curve],
    sets: Sequence[str],
    direction: str | None,
) -> None:
    training, validations = curves.get(name), _validations(name, curves, sets)
    drawn = [curve for curve in (training, *validations.values()) if curve is not None]
    epochs = [epoch for curve in drawn for epoch in curve.epochs]
    dashed, solid = _looks(len(set(epochs)))
    if training is not None:
        axes.plot(*_gapped(training), **(dashed if validations else solid), label="training")
    for number, (label, curve) in enumerate(validations.items()):
        color = COLORS[number % len(COLORS)] if len(validations) > 1 else BLUE
        axes.plot(*_gapped(curve), **{**solid, "color": color}, label=label)
    _scale(axes, name, drawn, direction)
    if len(validations) < 2:  # of several, none is the one that counts
        _mark_best(axes, drawn[-1], direction)
    _mark_gaps(axes, drawn)
    _dress(axes, name, epochs)


def _validations(name: str, curves: Mapping[str, Curve], sets: Sequence[str]) -> dict[str, Curve]:
    """Return the curves of a panel that are a validation's, by their labels."""
    found = {label: curves.get(prefix + name) for prefix, label in _prefixes(sets).items()}
    return {label: curve for label, curve in found.items() if curve is not None}


def _looks(points: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the styles of the training's and validation's curves. Many points leave no room."""
    marker = "o" if points <= MARKED_EPOCHS else ""
    solid = {"color": BLUE, "linewidth": 1.6, "marker": marker, "markersize": 3.5}
    if points > DASHED_EPOCHS:
        return {"color": BLUE, "linewidth": 0.9, "alpha": 0.4}, {"color": BLUE, "linewidth": 0.9}
    dashed = {**solid, "linewidth": 1.2, "linestyle": "--", "markerfacecolor": "white"}
    return dashed, solid


def _gapped(curve: Curve) -> tuple[list[int], list[float]]:
    """Return a curve with gaps where it isn't finite."""
    return curve.epochs, [v if math.isfinite(v) else math.nan for v in curve.values]


def _scale(axes: Axes, name: str, drawn: list[Curve], direction: str | None) -> None:
    """Use a log scale if values that should fall (losses, rates) span decades."""
    values = [value for curve in drawn for _, value in curve.finite()]
    goes_down = direction == "min" or "learning_rate" in name
    if goes_down and values and min(values) > 0 and max(values) / min(values) >= LOG_RATIO:
        axes.set_yscale("log")
    elif values and max(values) == min(values):
        margin = 0.1 * abs(values[0]) or 0.1
        axes.set_ylim(values[0] - margin, values[0] + margin)
    axes.margins(y=0.12)


def _mark_best(axes: Axes, curve: Curve, direction: str | None) -> None:
    best = curve.best(direction)
    if best is not None and len(curve.finite()) > 1:
        mark(axes, *best, f"best {best[1]:.4g} in epoch {best[0]}")


def _mark_gaps(axes: Axes, drawn: list[Curve]) -> None:
    pairs = [pair for curve in drawn for pair in zip(curve.epochs, curve.values, strict=True)]
    lost = sorted({epoch for epoch, value in pairs if not math.isfinite(value)})
    if lost:
        axes.plot(
            lost, [0.03] * len(lost), "x", color=ORANGE, markersize=5, linestyle="none",
            transform=axes.get_xaxis_transform(), clip_on=False, label=LOST,
        )  # fmt: skip
    if len(lost) and not any(curve.finite() for curve in drawn):
        axes.set_yticks([])


def _dress(axes: Axes, name: str, epochs: list[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    # A long name gets a line of its own above the best value.
    below = "\n" if len(name) > LONGEST_NAME and axes.get_title(loc="right") else ""
    dress(axes, name + below)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    first, last = min(epochs), max(epochs)
    side = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - min(side, 0.5), last + side)  # there is no epoch 0


def _explain(places: list[Axes]) -> None:
    """Add legends for training and validation, and for crosses if there are any."""
    is_pending = True
    for axes in places:
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        shown = [LOST] if LOST in named else []
        if is_pending and set(named) - {"training", LOST}:
            shown = list(named)
            is_pending = False
        if shown:
            axes.legend([named[name] for name in shown], shown, **LEGEND)


def curve_values(values: Sequence[Any]) -> list[float] | None:
    """Return a log's values as floats; None if they aren't numbers (matrices, texts)."""
    if not all(isinstance(value, numbers.Real) for value in values):
        return None
    return [float(value) for value in values]


BEGINNING = 6
"""The first updates, whose losses set the height of the picture."""


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
        rates, losses, smoothed: one value per update.
        suggested: the index of the suggested rate; None if there is none.
        figure, axes: matplotlib objects to draw in. None makes a new figure that pyplot doesn't
            manage.
        size: width and height of the new figure in inches.
        path: a file to write as well: `.png`, `.svg`, `.pdf`, ….

    Raises:
        MissingPackageError: matplotlib isn't installed.
        ArgumentTypeError: `figure`, `axes` or `path` has a wrong type.
    """
    panel = one_panel("RateRange.plot()", size or (6.0, 3.4), figure=figure, axes=axes, path=path)
    with panel as (drawn, place):
        dress(place, "loss")
        place.plot(rates, losses, color=BLUE, linewidth=0.9, alpha=0.4, label="loss")
        place.plot(rates, smoothed, color=BLUE, linewidth=1.6, label="smoothed")
        if suggested is not None:
            rate, loss = rates[suggested], smoothed[suggested]
            mark(place, rate, loss, f"suggested learning rate {rate:.2g}", label="steepest fall")
        place.set_xscale("log")
        if len(rates) > 1:
            place.set_xlim(rates[0], rates[-1])
        place.set_ylim(*_bounds(smoothed))
        place.set_xlabel("learning rate")
        place.legend(**LEGEND)
    return drawn


def _bounds(smoothed: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to show. A last one that explodes would flatten all others."""
    finite = [loss for loss in smoothed if math.isfinite(loss)]
    low = min(finite, default=0.0)
    begin = max(finite[:BEGINNING], default=1.0)
    margin = 0.1 * (begin - low) or 0.1 * abs(low) or 0.1
    return low - 2 * margin, begin + 5 * margin
