"""How programs are run: each in a new folder and with a time limit."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO

from benchmarks.agents.task import Task

OUTPUT = "output.txt"
"""The file in a program's folder that gets what it prints."""


class Runner:
    """Runs programs one after the other.

    Args:
        quick: whether programs begin in a fork of one process that has imported torch and fitkit,
            which saves the imports' seconds. Without it each is `python solution.py`.
        patience: by how much the time limits are multiplied, for slow machines.
    """

    def __init__(self, quick: bool = False, patience: float = 1) -> None:
        self.patience = patience
        self._host: subprocess.Popen[str] | None = None
        self._quick = quick and hasattr(os, "fork")

    def failure(self, task: Task, program: str) -> str | None:
        """Run a program for a task and judge it; what is wrong, or None."""
        with tempfile.TemporaryDirectory(prefix="fitkit-agent-") as name:
            folder = Path(name)
            task.give(folder)
            (folder / "solution.py").write_text(program, encoding="utf-8")
            seconds = max(1, round(task.seconds * self.patience))
            status = self._run(folder, seconds, task.alone)
            if status:
                printed = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
                end = "\n".join(printed.splitlines()[-15:])
                late = status in (-signal.SIGALRM, -signal.SIGKILL)
                why = f"took more than {seconds} s" if late else f"ended with status {status}"
                return f"the program {why}:\n{end}"
            try:
                task.check(folder)
            except AssertionError as error:
                return str(error) or "a check failed"
            except Exception as error:  # a file of an unexpected kind
                return f"{type(error).__name__}: {error}"
        return None

    def _run(self, folder: Path, seconds: int, alone: bool) -> int:
        if self._quick and not alone:
            if self._host is None:
                self._host = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.agents.programs"],
                    cwd=Path(__file__).parents[2],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            assert self._host.stdin is not None and self._host.stdout is not None
            print(seconds, folder, file=self._host.stdin, flush=True)
            return int(self._host.stdout.readline())
        with (folder / OUTPUT).open("w") as output:
            return _in_session(folder, seconds, output)

    def close(self) -> None:
        """End the process that programs are forked from."""
        if self._host is not None:
            self._host.communicate()
            self._host = None


def _in_session(folder: Path, seconds: int, output: IO[str]) -> int:
    """Run a program with all that it starts in a session of its own, which ends with it."""
    program = subprocess.Popen(
        [sys.executable, "solution.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return program.wait(seconds)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        else:
            program.kill()
        program.wait()


def host() -> None:
    """Run the programs that the lines of the standard input name, each in a fork."""
    # What a training imports, so that programs needn't; it starts no threads, which a fork loses.
    for name in ("fitkit", "h5py", "rich.console", "torch._dynamo", "torchmetrics"):
        importlib.import_module(name)
    for line in sys.stdin:
        seconds, _, folder = line.rstrip("\n").partition(" ")
        child = os.fork()
        if not child:
            os._exit(_forked(Path(folder), int(seconds)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _forked(folder: Path, seconds: int) -> int:
    """Run a program in this process; its status."""
    signal.alarm(seconds)
    os.chdir(folder)
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv, sys.path[0] = ["solution.py"], str(folder)
    try:
        runpy.run_path("solution.py", run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def solution_of(folder: Path) -> str:
    """Return the program that an agent left in a folder."""
    path = folder / "solution.py"
    if not path.is_file():
        raise SystemExit(f"There is no {path}.")
    return path.read_text(encoding="utf-8")


def leave(task: Task, folder: Path) -> None:
    """Write a task's files, and what an agent is told, into a new or empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} isn't empty.")
    task.give(folder)
    (folder / "TASK.md").write_text(task.prompt + "\n", encoding="utf-8")


if __name__ == "__main__":
    host()
