"""What a machine has, who started this process, and where its calls are.

Example:
    >>> from fitkit.seams.machines import Machine, usable_cores
    >>> usable_cores() >= 1
    True
    >>> Machine.here().count("cpu")
    1
"""

from fitkit.distributed.cluster import (
    MOST_RANKS,
    Cluster,
    Environment,
    LaunchVariables,
    detect,
)
from fitkit.distributed.devices import Machine, choose_kind, overload, usable_cores
from fitkit.pulse import Pulse, Stillness, pulses
from fitkit.training.forks import STACKS

__all__ = [
    "MOST_RANKS",
    "STACKS",
    "Cluster",
    "Environment",
    "LaunchVariables",
    "Machine",
    "Pulse",
    "Stillness",
    "choose_kind",
    "detect",
    "overload",
    "pulses",
    "usable_cores",
]
