"""Whether this process is a rank that a script started, as `ddp` starts them.

Importing this file marks such a process as one, and ends one whose script has ended.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.other_ranks import end_with_parent
from fitkit.extras.launchers.private_folder import process_name

VARIABLES = ("FITKIT_LAUNCHED", "FITKIT_PARENT", "RANK")
"""By which a process knows that it is one of a script's ranks."""

try:
    STARTED_IN = os.getcwd()
    """Where the script was started, or was when it imported fitkit: its path is relative to it."""
except FileNotFoundError:
    STARTED_IN = os.path.sep


def check_script_size(started: int, asked: int) -> None:
    """Refuse another number of ranks than the script has already.

    Raises:
        ConfigurationError: with both numbers.
    """
    if started != asked:
        raise ConfigurationError(
            f"devices asks for {asked} ranks, but this script already runs on {started}, and it "
            f"can't be restarted midway. Give all models with strategy='ddp' {started} devices, "
            "or write strategy='ddp_spawn'."
        )


def is_script_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of a script's ranks, not only started by one of them.

    What a rank starts inherits its variables. FITKIT_LAUNCHED is `"1"` until the process that it
    is meant for has imported fitkit, and is that process's name from then on.
    """
    launched = environment.get("FITKIT_LAUNCHED", "").strip()
    parent = environment.get("FITKIT_PARENT", "")
    if environment.get("RANK") == "0":
        return bool(launched) and parent == process_name(os.getpid())
    if launched == "1":
        return parent == process_name(os.getppid())
    return bool(launched) and launched == process_name(os.getpid())


def _is_orphan(environment: Mapping[str, str]) -> bool:
    """Whether this is a rank whose rank 0 ended before it came here.

    What a rank started later names the rank itself, or belongs to the rank's session.
    """
    parent = environment.get("FITKIT_PARENT", "").strip()
    number = re.match("[0-9]{1,9}(?=-|$)", parent)
    if environment.get("FITKIT_LAUNCHED", "").strip() != "1" or number is None:
        return False
    if environment.get("RANK") == "0" or not hasattr(os, "getsid") or os.getsid(0) != os.getpid():
        return False
    try:
        os.kill(int(number[0]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # Numbers are used again: another process has this one by now.
    return process_name(int(number[0])) != parent


if is_script_rank(os.environ) and os.environ.get("RANK") != "0":
    os.environ["FITKIT_LAUNCHED"] = process_name(os.getpid())
    end_with_parent()
elif _is_orphan(os.environ):
    _found = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
    sys.exit(
        f"fitkit: this process exits, because its environment ({_found}) makes it a rank of a "
        "script whose rank 0 has ended. If it is a separate program, unset "
        f"{', '.join(VARIABLES)}."
    )
