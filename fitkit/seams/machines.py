"""What a machine has, who started this process, and where its calls are.

Example:
    >>> from fitkit.seams.machines import Machine, usable_cores
    >>> usable_cores() >= 1
    True
    >>> Machine.here().count("cpu")
    1
"""

from fitkit.distributed.cluster import detect
from fitkit.distributed.devices import Machine, choose_kind, overload, usable_cores
from fitkit.distributed.launchers.meeting_folder import parent_of
from fitkit.distributed.launchers.script import is_script_rank
from fitkit.pulse import Pulse, Stillness, pulses
from fitkit.training.forks import STACKS

__all__ = [
    "STACKS",
    "Machine",
    "Pulse",
    "Stillness",
    "choose_kind",
    "detect",
    "is_script_rank",
    "overload",
    "parent_of",
    "pulses",
    "usable_cores",
]
