"""How the ranks of a run come to make the same call; where there is one, it is made here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fitkit.registry import Registry

Result = TypeVar("Result")


class Launcher(Protocol):
    """Makes one call on every rank of a run.

    Attributes:
        sends_calls: whether the other ranks get the call, with its data, from rank 0.
    """

    sends_calls: bool

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

    sends_calls: bool = False

    def launch(self, verb: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function(*args)` here."""
        return function(*args)

    def on_rank_zero(self, what: str, work: Callable[[], None]) -> None:
        """Do it here."""
        work()


LAUNCHERS: Registry[Callable[[Any, int, bool], Launcher]] = Registry("launcher")
"""What starts ranks: called with the strategy, how many there are, and whether to show what the
others print."""
LAUNCHERS.promise("fitkit.extras.launchers.script:started", "script")
LAUNCHERS.promise("fitkit.extras.launchers.workers:WorkersLauncher", "workers")
