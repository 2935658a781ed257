"""The launcher of a run with one rank: the call is made here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Launcher(Protocol):
    """Makes one call on every rank of a run and returns rank 0's result."""

    def launch(self, function: Callable[..., Result], *args: Any) -> Result: ...


class InlineLauncher:
    """The caller's process is the only rank."""

    def launch(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function(*args)` here."""
        return function(*args)
