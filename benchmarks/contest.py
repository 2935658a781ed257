"""Contenders in processes of their own, which take turns with a reference."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import Row, Seconds, in_turns, row_of, timed
from benchmarks.side import calls_a_step
from benchmarks.tasks import Task, data_of, net_of
from benchmarks.with_fitkit import runner

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = Path(os.environ.get("PEERS_PYTHON", ROOT / ".venv-peers" / "bin" / "python"))
OURS = ("fitkit", "careful", "tuned", "naive")
PEERS = {
    "Lightning": "lightning",
    "Keras": "keras",
    "Keras on JAX": "jax",
    "skorch": "skorch",
    "Poutyne": "poutyne",
    "Ignite": "ignite",
    "Accelerate": "accelerate",
}
"""The peers, and the modules that they need."""


@lru_cache
def peers_there() -> tuple[str, ...]:
    """Return the peers that can be imported in their environment."""
    if not PEERS_PYTHON.exists():
        return ()
    code = (
        "import importlib.util as u, sys; "
        "print(*[m for m in sys.argv[1:] if u.find_spec(m) is not None])"
    )
    found = subprocess.run(
        [PEERS_PYTHON, "-c", code, *PEERS.values()], capture_output=True, text=True, timeout=60
    )
    return tuple(name for name, module in PEERS.items() if module in found.stdout.split())


class SideError(Exception):
    """A contender that could do its task can't any more."""


class Side:
    """A contender's process.

    Args:
        contender: its name.
        task: what it does.

    Attributes:
        contender, task: as given.
        fault: what is wrong with its answers, or why it can't do the task.
        calls: Python and C calls a step.
        torch: the release that its environment has.
        failed: whether it can't do the task.
    """

    def __init__(self, contender: str, task: Task) -> None:
        self.contender, self.task = contender, task
        python = str(PEERS_PYTHON) if contender in PEERS else sys.executable
        self._process = subprocess.Popen(
            [
                python,
                "-m",
                "benchmarks.side",
                contender,
                json.dumps(dataclasses.asdict(task)),
                *(["-v"] if "BENCH_VERBOSE" in os.environ else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # FITKIT_VERBOSE and CI would change what is shown unasked.
            env={
                **{k: v for k, v in os.environ.items() if k not in ("CI", "FITKIT_VERBOSE")},
                "OMP_NUM_THREADS": "1",
                "TERM": "xterm",
            },
        )
        found = self._answer()
        self.failed = "failed" in found
        self.fault: str = found.get("failed", found.get("fault", ""))
        self.calls: int | None = found.get("calls")
        self.torch: str = found.get("torch", "")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"failed": f"its process ended ({self._process.wait()})"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self) -> Seconds:
        """One run."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "failed" in answer:
            raise SideError(answer["failed"])
        return Seconds(**answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def contest(
    scenario: str,
    task: Task,
    contenders: tuple[str, ...],
    reference: str,
    pairs: int,
    *,
    with_itself: bool = True,
) -> Iterator[Row]:
    """Yield the figures of each contender in a task, by pairs of runs with the reference.

    One that learns nothing or answers wrongly is timed and marked; one that fails is named.

    Args:
        contenders: their names.
        pairs: of runs for each.
        with_itself: whether the first row is the reference's own, against a second process of
            its own, which shows what noise there is.
    """
    others = [contender for contender in contenders if contender != reference]
    with closing(Side(reference, task)) as base:
        for contender in [reference] * with_itself + others:
            with closing(Side(contender, task)) as side:
                yield against(scenario, base, side, pairs)


def against(scenario: str, base: Side, side: Side, pairs: int) -> Row:
    """Return a side's figures beside another's, which may do another task of as many steps."""
    if base.failed or base.fault:
        raise SystemExit(f"{base.task.name}: the reference {base.contender}: {base.fault}")
    names: dict[str, Any] = {
        "scenario": scenario,
        "task": side.task.name,
        "contender": side.contender,
        "reference": base.contender if base.task == side.task else base.task.name,
    }
    if side.failed:
        return Row(**names, note=f"fails: {side.fault}")
    try:
        found = in_turns(base.run, side.run, pairs)
    except SideError as error:
        return Row(**names, note=f"fails: {error}")
    other = "" if side.torch == base.torch else f"with torch {side.torch}"
    note = ", ".join(filter(None, [side.fault, other]))
    return row_of(found, 1e6 / side.task.steps, **names, calls=side.calls, note=note)


def in_one_process(scenario: str, base: Task, task: Task, pairs: int) -> Row:
    """fitkit's figures in a task beside those in another of as many steps, in this process.

    For differences of a few microseconds: two processes' memory lies differently, which alone
    makes steps differ by a twentieth.
    """
    (reference, _), (run, net) = (_run_here(each) for each in (base, task))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = in_turns(partial(timed, reference), partial(timed, run), pairs)
    finally:
        torch.set_num_threads(threads)
    calls = calls_a_step(run, net)
    names: dict[str, Any] = {"scenario": scenario, "task": task.name, "reference": base.name}
    return row_of(found, 1e6 / task.steps, **names, contender="fitkit", calls=calls)


def _run_here(task: Task) -> tuple[Callable[[], Any], nn.Module]:
    """fitkit's run of a task, after a first one; and its net."""
    net, (x, y) = net_of(task), data_of(task)
    run = runner(task, net, x, y)
    run()
    return run, net
