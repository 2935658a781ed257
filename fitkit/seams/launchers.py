"""For what starts the ranks of a run: processes, how they meet, and how they end together.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.launchers import LAUNCHERS
    >>> class Noted:
    ...     "Makes each call on one rank, and notes it."
    ...     sends_calls = False
    ...     calls = []
    ...     def __init__(self, strategy, size, shows_output):
    ...         self.size = size
    ...     def launch(self, verb, function, *arguments):
    ...         self.calls.append((verb, self.size))
    ...         return function(*arguments)
    ...     def on_rank_zero(self, what, work):
    ...         work()
    >>> added = LAUNCHERS.add("noted", Noted)
    >>> LAUNCHERS["noted"](None, 1, False).launch("fit", abs, -3)
    3
"""

from fitkit.distributed.launchers import LAUNCHERS, InlineLauncher, Launcher
from fitkit.distributed.world import (
    abandon,
    in_own_group,
    is_abandoned,
    note_own_group,
    users_store,
)
from fitkit.pickling import reduced_for_workers
from fitkit.pulse import ABOUT, silence_s

__all__ = [
    "ABOUT",
    "LAUNCHERS",
    "InlineLauncher",
    "Launcher",
    "abandon",
    "in_own_group",
    "is_abandoned",
    "note_own_group",
    "reduced_for_workers",
    "silence_s",
    "users_store",
]
