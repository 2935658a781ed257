"""The keys under which metrics are logged."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from fitkit.outputs import log_name


class LogKeys:
    """Gives each metric a key of its own, as Keras does.

    The second `mae` becomes `mae_1`. A weighted metric whose name a plain one has becomes
    `weighted_mae`. `loss` is taken from the start: a metric of that name becomes `loss_1`.
    """

    def __init__(self, outputs: Iterable[Hashable]) -> None:
        self._taken = {"loss", *(log_name(str(output), "loss") for output in outputs)}

    def key(self, output: Hashable, name: str, *, weighted: bool = False) -> str:
        """The key of the next metric, which is then taken."""
        if weighted and log_name(str(output), name) in self._taken:
            name = f"weighted_{name}"
        key = candidate = log_name(str(output), name)
        number = 0
        while candidate in self._taken:
            number += 1
            candidate = f"{key}_{number}"
        self._taken.add(candidate)
        return candidate
