"""How the ranks of a run come to make the same call; where there is one, it is made here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Launcher(Protocol):
    """Makes one call on every rank of a run."""

    def launch(self, verb: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function(*args)` on every rank; return what this rank's call gave.

        Args:
            verb: the call's name, such as "fit". Ranks that meet for two verbs say so.
        """

    def on_rank_zero(self, what: str, work: Callable[[], None]) -> None:
        """Do something on rank 0 alone, outside of a call; where the others run the same program
        they wait until it is done."""


class InlineLauncher:
    """The caller's process is the only rank."""

    def launch(self, verb: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function(*args)` here."""
        return function(*args)

    def on_rank_zero(self, what: str, work: Callable[[], None]) -> None:
        """Do it here."""
        work()
