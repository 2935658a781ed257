"""A contender's own process: does its task when asked, and says what each run took.

Started by `contest.py` with the contender's name and the task as JSON; answers on its standard
output, a line of JSON each time: first what the checks found, then a run's seconds for each line
that comes in. What contenders print goes into a terminal that nobody looks at.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from benchmarks.loops import careful, naive, tuned
from benchmarks.measuring import timed
from benchmarks.tasks import Task, data_of, fault_of, judged, net_of

LOOPS = {"careful": careful, "tuned": tuned, "naive": naive}


def maker_of(contender: str) -> Callable[..., Callable[[], Any]]:
    """Return what makes a contender's runs."""
    if contender in LOOPS:
        return LOOPS[contender]
    if contender == "fitkit":
        from benchmarks.with_fitkit import runner

        return runner
    from benchmarks.peers import PEERS

    return PEERS[contender]


def calls_a_step(run: Callable[[], Any], net: nn.Module) -> int | None:
    """Python's and C's calls from a run's first forward pass to its last, for each step between.

    Counted by `sys.setprofile`, in this thread: no clock takes part, so it is the same each time.
    None where the net is compiled: its forward isn't Python's any more.
    """
    forward = type(net).forward.__code__
    count = 0
    marks: list[int] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if event == "call" and frame.f_code is forward:
                marks.append(count)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    if len(marks) < 2:
        return None
    return round((marks[-1] - marks[0]) / (len(marks) - 1))


def quiet_terminal() -> tuple[Any, subprocess.Popen[bytes]]:
    """Make standard output and error a terminal whose text is thrown away.

    Returns:
        The standard output that there was, and what reads the terminal.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    ours, theirs = pty.openpty()
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL)
    os.close(ours)
    os.dup2(theirs, 1)
    if "-v" not in sys.argv:
        os.dup2(theirs, 2)
    return answers, reader


def main() -> None:
    contender, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    answers, reader = quiet_terminal()
    try:
        net, (x, y) = net_of(task), data_of(task)
        before = judged(net, x, y)["loss"]
        run = maker_of(contender)(task, net, x, y)
        run()
        fault = fault_of(task, net, x, y, before, run())
        calls = calls_a_step(run, net)
        answers.write(json.dumps({"fault": fault, "calls": calls, "torch": torch.__version__}))
        answers.write("\n")
        for _ in sys.stdin:
            took = timed(run)
            answers.write(json.dumps(vars(took)) + "\n")
    except Exception as error:
        answers.write(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}) + "\n")
    finally:
        reader.kill()
        answers.flush()
        # Libraries leave threads that would keep the process.
        os._exit(0) if threading.active_count() > 1 else None


if __name__ == "__main__":
    main()
