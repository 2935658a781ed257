"""What an evaluation gives: a dict that a notebook shows as a table."""

from __future__ import annotations

from typing import Any


class Results(dict[str, Any]):
    """Values by name, `loss` first: a dict in all but how a notebook shows it.

    It is copied and pickled as a plain dict, which can be read where there is no fitkit.
    """

    def _repr_html_(self) -> str:
        from fitkit.pictures.html import results_html

        return results_html(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
