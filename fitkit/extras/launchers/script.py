"""The launcher of `ddp`: the other ranks are the script, started again for each.

Rank 0 (the process that the user started) makes the others at the first call that needs them.
They run the script from its beginning and come to the same call. They end with their script, with
rank 0's (at most `EXIT_S` later), and with rank 0's process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from fitkit.errors import ConfigurationError, WorkerError, warn, warn_once
from fitkit.extras.ddp import DDP
from fitkit.extras.launchers.meeting_folder import MeetingFolder
from fitkit.extras.launchers.other_ranks import OtherRanks
from fitkit.extras.launchers.private_folder import is_private, process_name
from fitkit.extras.launchers.process import RankProcess, StartedRanks, threads_shared
from fitkit.extras.launchers.ranks import JoinsRanks, RankLauncher
from fitkit.extras.launchers.script_rank import (
    STARTED_IN,
    VARIABLES,
    check_script_size,
    is_script_rank,
)
from fitkit.extras.launchers.watch import Failure
from fitkit.extras.launchers.workers import WorkersLauncher
from fitkit.printing import say, where_possible
from fitkit.seams.launchers import in_own_group
from fitkit.seams.machines import detect

Result = TypeVar("Result")

RUNNERS = {"pytest": "pytest", "py.test": "pytest", "unittest": "unittest", "pdb": "a debugger"}
"""Programs that run user code and would do all else that they do again, too."""
EXIT_S = 10.0
"""How long the other ranks' scripts may continue after rank 0's has ended."""
EXIT_AFTER_FAILURE_S = 2.0
HOST = "127.0.0.1"


class ScriptLauncher(RankLauncher):
    """Makes a call that the same script makes in all ranks; rank 0 starts the others for it.

    Args:
        strategy: enters and leaves the ranks' process group.
        size: how many ranks there are.
        shows_output: whether rank 0 shows what the others print.
    """

    def __init__(self, strategy: JoinsRanks, size: int, shows_output: bool = False) -> None:
        super().__init__(strategy)
        self._size = size
        self._shows_output = shows_output

    def launch(self, verb: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function(*arguments)` on every rank; see `RankLauncher.launch`."""
        if in_own_group():
            return super().launch(verb, function, *arguments)
        self.others: ScriptRanks | JoinedRanks = ranks_of_script(self._size, self._shows_output)
        try:
            self.call_store: Store = self.others.folder.next_store()
            return super().launch(verb, function, *arguments)
        except BaseException:
            self.others.failed = True
            raise


def started(strategy: DDP, size: int, shows_output: bool = False) -> RankLauncher:
    """Return the launcher of the script's ranks; worker processes where there is no script, with a
    warning."""
    other = what_runs_instead_of_a_script()
    if other is None:
        return ScriptLauncher(strategy, size, shows_output)
    warn_once(
        f"strategy={strategy.name!r} starts the script again for each rank, but this is {other}. "
        "It uses worker processes instead, as strategy='ddp_spawn' does."
    )
    return WorkersLauncher(strategy, size, shows_output)


def what_runs_instead_of_a_script() -> str | None:
    """Return what this process runs, where that is no script that could be started again, else
    None.
    """
    main = sys.modules.get("__main__")
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        return "a notebook" if "ipykernel" in sys.modules else "IPython"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive session"
    if multiprocessing.parent_process() is not None:
        return "a process that multiprocessing started"
    module = getattr(getattr(main, "__spec__", None), "name", None) or ""
    for name in (module.split(".")[0], Path(sys.argv[0] if sys.argv else "").stem):
        if name in RUNNERS:
            return RUNNERS[name]
    files = [getattr(main, "__file__", None), *sys.argv[:1]]
    found = getattr(main, "__file__", None) and any(file and os.path.isfile(file) for file in files)
    if not (found and sys.executable and sys.orig_argv):
        return "code from standard input or the command line"
    return None


class ScriptRanks(StartedRanks):
    """A script's ranks as rank 0 sees them.

    Args:
        size: how many ranks there are, this one included.
        shows_output: whether this process shows what the others print.

    Attributes:
        failed: whether a call has failed here.
    """

    def __init__(self, size: int, shows_output: bool = False) -> None:
        port = _free_port()
        super().__init__(shows_output)
        self.size: int = size
        self.failed = False
        variables = {
            "FITKIT_LAUNCHED": "1",
            "FITKIT_PARENT": process_name(self.owner),
            "FITKIT_MEETING": str(self.folder.path),
            # For groups that the script makes itself by torch's `env://`.
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "NODE_RANK": "0",
        }
        self.processes: list[Any] = [
            RankProcess(
                rank,
                size,
                [sys.executable, *sys.orig_argv[1:]],
                {**variables, "RANK": name, "LOCAL_RANK": name},
                STARTED_IN,
                shows_output=shows_output,
            )
            for rank, name in enumerate(map(str, range(1, size)), 1)
        ]
        os.environ.update({**variables, "RANK": "0", "LOCAL_RANK": "0"})
        atexit.register(self.finish)

    def finish(self) -> None:
        """At the end of rank 0's script: let the others come to their end, too."""
        if os.getpid() != self.owner:
            return
        failed = self.failed or getattr(sys, "last_value", None) is not None
        with contextlib.suppress(OSError, RuntimeError):
            self.folder.store(0).set("over", "")
        deadline = time.monotonic() + (EXIT_AFTER_FAILURE_S if failed else EXIT_S)
        late = [other for other in self.processes if not other.ends_before(deadline)]
        self.end_processes()
        self.folder.remove()
        if failed:
            return
        for other in late:
            say(
                f"fitkit: stopped rank {other.rank}'s script, which was still running {EXIT_S:g} "
                "s after rank 0's script had ended.",
                stream="stderr",
            )
        failing = [other for other in self.processes if other not in late and other.has_failed()]
        for other in failing:
            say("fitkit: {0.what}\n{0.text}".format(other.failure()), stream="stderr")
        if failing:
            # A script that failed on some rank hasn't succeeded.
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with where_possible():
                    stream.flush()
            os._exit(1)


class JoinedRanks(OtherRanks):
    """A script's ranks as one that rank 0 started sees them; the attributes are `ScriptRanks`'s."""

    prints = False

    def __init__(self, environment: Mapping[str, str]) -> None:
        place = detect(environment)
        assert place is not None
        path = Path(environment.get("FITKIT_MEETING", ""))
        if not is_private(path):
            if is_private(path.parent):
                raise WorkerError("Rank 0's process has ended.")
            raise ConfigurationError(
                f"FITKIT_MEETING={str(path)!r} must be a folder that only this user can read. "
                "fitkit sets it for the ranks of a script. To start the script by itself, unset "
                f"{', '.join(VARIABLES)}."
            )
        self.size: int = place.world_size
        self.failed = False
        self.folder: MeetingFolder = MeetingFolder(path)
        self._store = self.folder.store(0)

    def lost(self) -> Failure | None:
        if self._store.check(["over"]):
            return Failure(0, "Rank 0's script has ended.")
        return None

    def during_call(self) -> AbstractContextManager[None]:
        return threads_shared(self.size)


def _free_port() -> int:
    """Return a port of this machine for the script's own process groups."""
    # A script that a rank of another script started has that script's port.
    inherited = bool(os.environ.get("FITKIT_LAUNCHED"))
    wanted = "" if inherited else os.environ.get("MASTER_PORT", "").strip()
    try:
        with socket.create_server((HOST, int(wanted or 0))) as listening:
            return int(listening.getsockname()[1])
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"MASTER_PORT={wanted!r} can't be used ({error}). Unset it to let fitkit choose a "
            "free port."
        ) from error


_ranks: ScriptRanks | JoinedRanks | None = None


def ranks_of_script(size: int, shows_output: bool = False) -> ScriptRanks | JoinedRanks:
    """Return this script's ranks; started, where they aren't yet.

    Args:
        size: how many.
        shows_output: whether rank 0 shows what the others print, where it starts them.

    Raises:
        ConfigurationError: there are others than `size`.
    """
    global _ranks
    if _ranks is None:
        joined = is_script_rank(os.environ)
        _ranks = JoinedRanks(os.environ) if joined else ScriptRanks(size, shows_output)
    check_script_size(_ranks.size, size)
    if shows_output and isinstance(_ranks, ScriptRanks) and not _ranks.shows_output:
        warn(
            "This script's other ranks already run without output='all', so their output can't be "
            "shown. Give output='all' to the first model that trains, or set "
            "FITKIT_RANK_OUTPUT=all."
        )
    return _ranks
