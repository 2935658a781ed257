"""The launcher of `ddp`: the other ranks are the script, started again for each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from fitkit.distributed.cluster import Cluster
from fitkit.distributed.launchers.existing import ExistingLauncher
from fitkit.distributed.launchers.process import ended_by_interrupt, threads_shared
from fitkit.distributed.launchers.script_ranks import ScriptRanks, ranks_of_script
from fitkit.distributed.launchers.watch import Failure
from fitkit.distributed.rendezvous import Meeting

if TYPE_CHECKING:
    from fitkit.distributed.strategies.base import Strategy

Result = TypeVar("Result")

RUNNERS = {"pytest": "pytest", "py.test": "pytest", "unittest": "unittest", "pdb": "a debugger"}
"""Programs that run user code and would do all else that they do again, too."""


class ScriptLauncher(ExistingLauncher):
    """Makes a call that the same script makes in all ranks; rank 0 starts the others for it.

    Args:
        strategy: enters and leaves the ranks' process group.
        size: how many ranks there are.
    """

    prints_apart = False

    def __init__(self, strategy: Strategy, size: int) -> None:
        super().__init__(strategy, Cluster("fitkit", 0, 0, size, size, 0, 1))
        self._size = size

    def launch(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call `function(*arguments)` on every rank; see `ExistingLauncher.launch`."""
        ranks = self._ranks
        try:
            return super().launch(function, *arguments)
        except BaseException:
            ranks.failed = True
            raise

    @property
    def _ranks(self) -> ScriptRanks:
        return ranks_of_script(self._size)

    def meet(self, verb: str) -> Store:
        ranks = self._ranks
        return Meeting(ranks.rank, ranks.size, verb, self.timeout).at(
            ranks.folder.next_store(), self.lost
        )

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        with threads_shared(self._size), ended_by_interrupt(self._ranks.end):
            yield

    def lost(self) -> Failure | None:
        return self._ranks.lost()


def what_runs_instead_of_a_script() -> str | None:
    """What this process runs, where that is no script that could be started again, else None."""
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
