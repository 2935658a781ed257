"""What a machine has, who started this process, and how it starts others.

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
from fitkit.distributed.launchers.payload import Payload
from fitkit.distributed.launchers.payload import load as load_payload
from fitkit.distributed.launchers.process import (
    RankProcess,
    end_own_session,
    end_with_parent,
    open_standard_files,
)
from fitkit.distributed.launchers.script import is_script_rank
from fitkit.distributed.script_objects import script, take_part

__all__ = [
    "Machine",
    "Payload",
    "RankProcess",
    "choose_kind",
    "detect",
    "end_own_session",
    "end_with_parent",
    "is_script_rank",
    "load_payload",
    "open_standard_files",
    "overload",
    "parent_of",
    "script",
    "take_part",
    "usable_cores",
]
