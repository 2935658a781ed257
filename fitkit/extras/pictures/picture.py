"""A figure of matplotlib's that nobody but its holder keeps.

Imports matplotlib: only imported where a picture is made.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine


class Picture(Figure):
    """A figure outside pyplot: no window, no display needed, and gone with its last name.

    pyplot's figures stay in memory until they are closed, and draw on a screen if there is one.
    `figure=plt.figure()` asks for one of those instead.
    """

    def __init__(self, **options: Any) -> None:
        # Padded: a panel's best value at the right must not run into the next one's name.
        super().__init__(layout=ConstrainedLayoutEngine(w_pad=0.12), **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        """How a notebook shows it, which otherwise knows pyplot's figures only."""
        file = io.BytesIO()
        self.savefig(file, format="png", facecolor="white")
        return file.getvalue()
