"""Medians and quartiles of runs that take turns: the one place where times become figures."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Spread:
    """A median between its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of some values; of a single one, that one three times."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, digits: int) -> str:
        """As tables have it: `1.02 [0.98 .. 1.05]`."""
        return f"{self.median:,.{digits}f} [{self.low:,.{digits}f} .. {self.high:,.{digits}f}]"


@dataclasses.dataclass
class Seconds:
    """What a run took: by the clock, and of the process's CPU time (all its threads)."""

    wall: float
    cpu: float


Run = Callable[[], Seconds]


def timed(run: Callable[[], Any]) -> Seconds:
    """Return what a call takes, with the garbage of earlier ones gone."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(reference: Run, candidate: Run, pairs: int) -> list[tuple[Seconds, Seconds]]:
    """Time runs of both, in turns (A B, B A, A B, …), so that the rest of the machine meets both.

    Returns:
        (reference, candidate) of each pair.
    """
    found = []
    for number in range(pairs):
        if number % 2 == 0:
            first = reference()
            found.append((first, candidate()))
        else:
            second = candidate()
            found.append((reference(), second))
    return found


@dataclasses.dataclass
class Row:
    """A contender's figures in one task.

    Attributes:
        scenario, task, contender: which.
        reference: whom the ratios are to.
        unit: of `wall` and `cpu`.
        wall, cpu: of each unit of work; None where it isn't measured.
        ratio, cpu_ratio: contender over reference, pair by pair.
        extra: the contender's CPU time less the reference's, pair by pair, in the same unit.
        calls: Python and C calls a step; they have no noise.
        note: what is wrong with its answers; empty where nothing is.
    """

    scenario: str
    task: str
    contender: str
    reference: str = ""
    unit: str = "µs a step"
    wall: Spread | None = None
    cpu: Spread | None = None
    ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    extra: Spread | None = None
    calls: int | None = None
    note: str = ""


def row_of(pairs: list[tuple[Seconds, Seconds]], scale: float, **names: Any) -> Row:
    """Return the candidate's row.

    Args:
        pairs: what `in_turns` gave.
        scale: from a run's seconds to the row's unit.
        names: the row's other fields.
    """
    return Row(
        wall=Spread.of([b.wall * scale for _, b in pairs]),
        cpu=Spread.of([b.cpu * scale for _, b in pairs]),
        ratio=Spread.of([b.wall / a.wall for a, b in pairs]),
        cpu_ratio=Spread.of([b.cpu / max(a.cpu, 1e-9) for a, b in pairs]),
        extra=Spread.of([(b.cpu - a.cpu) * scale for a, b in pairs]),
        **names,
    )
