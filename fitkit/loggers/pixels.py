"""A matplotlib figure as numbers, for loggers that keep pictures."""

from __future__ import annotations

from typing import Any

import numpy as np


def pixels(figure: Any) -> np.ndarray[Any, Any]:
    """A figure as (height, width, RGBA) bytes; its own canvas stays."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    before = figure.canvas
    try:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba()).copy()
    finally:
        figure.set_canvas(before)
