"""Tables for notebooks: a model, a training, an evaluation's values, in the page's own colours."""

from __future__ import annotations

import html
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitkit.arguments import plain_settings

if TYPE_CHECKING:
    from fitkit.extras.pictures.curves import Curve
    from fitkit.extras.summary import Summary


DEFAULTS = ("auto", "32-true")
"""Settings that say nothing, and aren't shown."""

MOST_ROWS = 60
"""The most rows shown open. A longer table is folded."""

MOST_CLASSES = 30
"""The most rows of a matrix that is drawn."""

WIDTH, HEIGHT = 120, 26
"""A small curve's size in pixels."""

# Half-transparent grey and the text's own colour are readable on white and on black.
LINE = "border-bottom:1px solid rgba(128,128,128,.35)"
CELL = f"padding:2px 12px 2px 0;text-align:left;vertical-align:middle;background:none;{LINE}"
NUMBER = CELL.replace("text-align:left", "text-align:right;font-variant-numeric:tabular-nums")
FAINT = "opacity:.65"
CURVE = "#3f8fd2"
"""A blue that is visible on white and on black."""


def history_html(curves: Mapping[str, Curve], best: Mapping[str, str], epochs: int) -> str:
    """Return a table with a row per log: its small curve, first, best and last value.

    Args:
        curves: the logs by name.
        best: `"min"` or `"max"` by name, if known.
        epochs: the number of epochs.
    """
    rows = [
        [
            _cell(html.escape(name)),
            _cell(_curve(curve)),
            _cell(_number(curve.values[0]), NUMBER),
            _cell(_best(curve, best.get(name)), NUMBER),
            _cell(_number(curve.values[-1]), NUMBER),
        ]
        for name, curve in curves.items()
    ]
    title = f"<b>History</b> of {_count(epochs, 'epoch')}"
    heads = [("log", CELL), ("", CELL), ("first", NUMBER), ("best", NUMBER), ("last", NUMBER)]
    return _block(title, _table(heads, rows) if rows else "")


def results_html(values: Mapping[str, Any]) -> str:
    """Return a table with a row per value of an evaluation.

    A square matrix, such as a confusion matrix, is a table of its own below. Other values show as
    text.
    """
    rows, matrices = [], ""
    for name, value in values.items():
        if _is_matrix(value):
            matrices += _matrix(str(name), value)
            continue
        is_number = isinstance(value, numbers.Real)
        text = _number(float(value)) if is_number else html.escape(str(value))
        look = NUMBER if is_number else f"{CELL};white-space:pre-wrap"
        rows.append([_cell(html.escape(str(name))), _cell(text, look)])
    table = _table([("log", CELL), ("value", NUMBER)], rows)
    return _block("<b>Evaluation</b>", f"{table}{matrices}")


def _is_matrix(value: Any) -> bool:
    shape: tuple[int, ...] = getattr(value, "shape", ())
    is_square = len(shape) == 2 and shape[0] == shape[1] and 2 <= shape[0] <= MOST_CLASSES
    return is_square and value.dtype.kind in "iuf" and bool((value >= 0).all())


def _matrix(name: str, values: Any) -> str:
    """Return a table of a matrix. A cell's colour is its share of the row, so rare classes show
    too.
    """
    look = "padding:2px 7px;border:0;text-align:right;font-variant-numeric:tabular-nums"
    faint = f"{look};{FAINT}"
    rows = []
    for number, row in enumerate(values.tolist()):
        whole = sum(row) or 1
        cells = [_cell(str(number), faint)]
        for value in row:
            shade = f"{look};background:rgba(63,143,210,{0.85 * value / whole:.2f})"
            cells.append(_cell(_short(value), shade))
        rows.append(cells)
    heads = [("", look), *((str(number), faint) for number in range(len(values)))]
    axes = f' <span style="{FAINT}">rows: true, columns: predicted</span>'
    title = html.escape(name) + axes * ("confusion" in name)
    return f'<div style="margin-top:8px">{title}</div>{_table(heads, rows)}'


def _short(value: float) -> str:
    """Return a cell's text: nothing for 0, so that the others stand out."""
    return "" if not value else f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


SHOWN = ("optimizer", "learning_rate", "loss", "metrics", "devices", "accelerator", "precision")
"""Arguments of compile that a model's view shows."""


def model_html(name: str, given: Mapping[str, Any], summary: Summary) -> str:
    """Return a table of a model's settings, its layers and their parameters.

    Args:
        name: the model's name.
        given: the arguments of `compile`.
        summary: the summary of its layers.
    """
    settings = plain_settings({k: given[k] for k in SHOWN if given.get(k) is not None})
    shown = " &middot; ".join(
        f'<span style="{FAINT}">{html.escape(key)}</span> {html.escape(str(value))}'
        for key, value in settings.items()
        if value not in DEFAULTS
    )
    rows = []
    for row in summary.rows:
        indent = f"padding-left:{1.2 * row.level:.1f}em"
        kind = html.escape(row.type)
        text = f'{html.escape(row.name)} <span style="{FAINT}">{kind}</span>' if row.name else kind
        count = "?" if row.parameters is None else f"{row.parameters:,}"
        if row.reused:
            count = "(reused)"
        elif not row.parameters and row.parameters is not None:
            count = ""
        rows.append(
            [
                _cell(text, f"{CELL};{indent}"),
                _cell(count, NUMBER),
                _cell(html.escape(row.trainable)),
            ]
        )
    heads = [("layer", CELL), ("parameters", NUMBER), ("trainable", CELL)]
    frozen = f", {summary.non_trainable:,} of them frozen" if summary.non_trainable else ""
    size = f"{summary.parameters:,} parameters{frozen}"
    title = f"<b>{html.escape(name)}</b> &middot; {size}"
    is_open = " open" if len(rows) <= MOST_ROWS else ""
    layers = (
        f'<details{is_open}><summary style="cursor:pointer">{_count(len(rows), "module")}</summary>'
        f"{_table(heads, rows)}</details>"
    )
    return _block(title, f"<div>{shown}</div>{layers}")


def _block(title: str, body: str) -> str:
    return f'<div style="color:inherit;line-height:1.5"><div>{title}</div>{body}</div>'


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _cell(content: str, look: str = CELL) -> str:
    return f'<td style="{look}">{content}</td>'


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th style="{look};font-weight:600">{text}</th>' for text, look in heads)
    body = "".join(f'<tr style="background:none">{"".join(cells)}</tr>' for cells in rows)
    return (
        '<table style="border-collapse:collapse;border:0;margin:4px 0;color:inherit">'
        f'<thead><tr style="background:none">{head}</tr></thead><tbody>{body}</tbody></table>'
    )


def _number(value: float) -> str:
    return f"{value:.4g}"


def _best(curve: Curve, direction: str | None) -> str:
    best = curve.best(direction)
    if best is None:
        return ""
    return f'{_number(best[1])} <span style="{FAINT}">epoch {best[0]}</span>'


def _curve(curve: Curve) -> str:
    """Return a small curve as SVG; broken where values aren't finite."""
    found = curve.finite()
    if len(found) < 2:
        return ""
    low, high = min(v for _, v in found), max(v for _, v in found)
    first, last = curve.epochs[0], curve.epochs[-1]
    paths, pen_is_down = [], False
    for epoch, value in zip(curve.epochs, curve.values, strict=True):
        if not math.isfinite(value):
            pen_is_down = False
            continue
        x = 2 + (WIDTH - 4) * (epoch - first) / max(last - first, 1)
        part = 0.5 if high == low else _part(value, low, high)
        paths.append(f"{'L' if pen_is_down else 'M'}{x:.1f} {2 + (HEIGHT - 4) * (1 - part):.1f}")
        pen_is_down = True
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="curve"><path d="{"".join(paths)}" fill="none" '
        f'stroke="{CURVE}" stroke-width="1.5" stroke-linejoin="round" '
        'stroke-linecap="round"/></svg>'
    )


def _part(value: float, low: float, high: float) -> float:
    # Halved first: the difference of two large numbers may be infinite.
    return (value / 2 - low / 2) / (high / 2 - low / 2)
