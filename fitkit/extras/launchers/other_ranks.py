"""What a process that holds a rank knows of the others, shows of their output, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from fitkit.arguments import check_choice
from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.watch import Failure

OUTPUT_VARIABLE = "FITKIT_RANK_OUTPUT"
OUTPUTS = ("rank_zero", "all")
PARENT_S = 1.0
"""How often a rank looks whether the process that started it is still there."""


def check_output(output: str | None) -> None:
    """Refuse what isn't one of the choices; None leaves the choice to the environment."""
    output = check_choice("output", output, (None, *OUTPUTS))


def shows_all(output: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the other ranks' lines are shown.

    Args:
        output: what the strategy was given; None for what the environment says.

    Raises:
        ConfigurationError: the variable has another value than the choices.
    """
    if output is not None:
        return output == "all"
    asked = environment.get(OUTPUT_VARIABLE, "").strip()
    if asked not in ("", *OUTPUTS):
        raise ConfigurationError(
            f"{OUTPUT_VARIABLE}={asked!r} must be {' or '.join(map(repr, OUTPUTS))}. Write "
            f"{OUTPUT_VARIABLE}=all to see what the other ranks print, or unset it."
        )
    return asked == "all"


class OtherRanks:
    """What a process knows of the other ranks: nothing, where a launcher such as torchrun started
    them.

    Attributes:
        prints: whether the user sees what they print.
    """

    prints = True

    def lost(self) -> Failure | None:
        """Return the failure of a rank that has ended; None where none has, or nobody here can
        know.
        """
        return None

    def during_call(self) -> AbstractContextManager[Any]:
        """Surround a call on this rank, from its beginning to its end."""
        return contextlib.nullcontext()


def end_with_parent() -> None:
    """End this rank as soon as the process that started it has gone, even by `kill -9`."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        end_own_session()

    threading.Thread(target=follow, name="fitkit-parent", daemon=True).start()


def end_own_session() -> NoReturn:
    """End this process and what it started at once: threads of torch may hang for ever.

    DataLoader workers hold copies of this rank's connections: while one of them lives, the other
    ranks don't notice that this one has gone.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
