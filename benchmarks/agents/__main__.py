"""The command of the agents' tasks.

python -m benchmarks.agents list                 # numbers and titles
python -m benchmarks.agents show 7               # what an agent is told
python -m benchmarks.agents give 7 FOLDER        # that, and the files it gets, in a new folder
python -m benchmarks.agents check 7 FOLDER       # run the solution.py in FOLDER, and judge it
python -m benchmarks.agents solutions [--wrong]  # all reference solutions, or the wrong ones
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from benchmarks.agents.programs import Runner, leave, solution_of
from benchmarks.agents.task import NAMES, Task, task


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked for; 1 where a program failed that shouldn't, or passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents", description="Tasks for coding agents."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="numbers, names and titles")
    show = commands.add_parser("show", help="what an agent is told")
    show.add_argument("task", help="a number or a name")
    give = commands.add_parser("give", help="write the task and its files into a new folder")
    give.add_argument("task", help="a number or a name")
    give.add_argument("folder", type=Path)
    check = commands.add_parser("check", help="run the solution.py of a folder, and judge it")
    check.add_argument("task", help="a number or a name")
    check.add_argument("folder", type=Path)
    solutions = commands.add_parser("solutions", help="check the reference solutions")
    solutions.add_argument("--wrong", action="store_true", help="check that wrong ones fail")
    solutions.add_argument("tasks", nargs="*", default=list(NAMES), help="default: all")
    given = parser.parse_args(arguments)
    if given.command == "list":
        for one in map(task, NAMES):
            print(f"{one.number:2}  {one.name:24}{one.title}")
    elif given.command == "show":
        print(task(given.task).prompt)
    elif given.command == "give":
        leave(task(given.task), given.folder)
    elif given.command == "check":
        failure = Runner().failure(task(given.task), solution_of(given.folder))
        print(failure or "passed")
        return int(failure is not None)
    else:
        return _solutions([task(name) for name in given.tasks], given.wrong)
    return 0


def _solutions(tasks: list[Task], wrong: bool) -> int:
    runner, bad = Runner(quick=True), 0
    for one in tasks:
        absent = [name for name in one.needs if importlib.util.find_spec(name) is None]
        if absent:
            print(f"{one.number:2}  {one.name:24}left out: needs {', '.join(absent)}")
            continue
        start = time.perf_counter()
        program = one.wrong_program if wrong else one.solution
        failure = runner.failure(one, program)
        bad += (failure is None) is wrong
        seconds = f"{time.perf_counter() - start:5.1f} s"
        print(f"{one.number:2}  {one.name:24}{seconds}  {failure or 'passed'}", flush=True)
    runner.close()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
