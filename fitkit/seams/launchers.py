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

from fitkit.distributed import world
from fitkit.distributed.launchers import LAUNCHERS, Launcher
from fitkit.distributed.launchers.private_folder import is_private, private_folder, process_name
from fitkit.distributed.launchers.process import (
    OtherRanks,
    end_own_session,
    end_with_parent,
)
from fitkit.distributed.launchers.ranks import JoinsRanks, RankLauncher
from fitkit.distributed.launchers.script_rank import STARTED_IN, VARIABLES, check_script_size
from fitkit.distributed.launchers.watch import LAST_RESORT_S, Failure
from fitkit.distributed.script_objects import is_of_script, script, take_part
from fitkit.distributed.stores import Patience
from fitkit.pickling import reduced_for_workers

__all__ = [
    "LAST_RESORT_S",
    "LAUNCHERS",
    "STARTED_IN",
    "VARIABLES",
    "Failure",
    "JoinsRanks",
    "Launcher",
    "OtherRanks",
    "Patience",
    "RankLauncher",
    "check_script_size",
    "end_own_session",
    "end_with_parent",
    "is_of_script",
    "is_private",
    "private_folder",
    "process_name",
    "reduced_for_workers",
    "script",
    "take_part",
    "world",
]
