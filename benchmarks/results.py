"""Rows as JSON, as a markdown table, and as lines on the way."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fitkit
from benchmarks.measuring import Row, Spread


def machine() -> dict[str, Any]:
    """Return what the figures were taken on."""
    return {
        "date": datetime.date.today().isoformat(),
        "fitkit": fitkit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def line(row: Row) -> str:
    """Return a row in a line, for whoever waits."""
    cells = [f"{row.task:32}", f"{row.contender:11}"]
    if row.cpu is not None:
        cells.append(f"CPU {row.cpu.median:>10,.1f} {row.unit}")
    elif row.wall is not None:
        cells.append(f"{row.wall.median:>10,.1f} {row.unit}")
    if row.cpu_ratio is not None and row.reference:
        cells.append(f"{row.cpu_ratio.text(3)} of {row.reference}")
    if row.calls is not None:
        cells.append(f"{row.calls} calls")
    return "  ".join([*cells, *([f"!! {row.note}"] if row.note else [])])


def markdown(rows: Iterable[Row], where: dict[str, Any]) -> str:
    """All rows as tables, one a scenario, below a line about the machine."""
    facts = (
        f"Measured {where['date']}: {where['machine']}, {where['cores']} cores, load "
        f"{where['load']}, Python {where['python']}, torch {where['torch']}, one thread; "
        "medians [quartiles] of pairs of runs that take turns."
    )
    parts = [facts]
    by_scenario: dict[str, list[Row]] = {}
    for row in rows:
        by_scenario.setdefault(row.scenario, []).append(row)
    for scenario, found in by_scenario.items():
        parts.append(f"### {scenario}\n\n{table(found)}")
    return "\n\n".join(parts) + "\n"


HEADINGS = ("", "", "wall", "CPU", "wall ÷ reference", "CPU ÷ reference", "CPU more", "calls", "")


def table(rows: list[Row]) -> str:
    """Return a scenario's rows as a markdown table; columns that nobody fills are left out."""
    cells = [
        (
            row.task,
            f"**{row.contender}**" if row.contender == "fitkit" else row.contender,
            _figure(row.wall, row.unit),
            _figure(row.cpu, row.unit),
            _ratio(row.ratio, row.reference),
            _ratio(row.cpu_ratio, row.reference),
            "" if row.extra is None else row.extra.text(1),
            "" if row.calls is None else f"{row.calls:,}",
            row.note,
        )
        for row in rows
    ]
    used = [number for number in range(len(HEADINGS)) if any(row[number] for row in cells)]
    lines = ["| " + " | ".join(HEADINGS[number] for number in used) + " |"]
    lines.append("|" + "---|" * len(used))
    lines += ["| " + " | ".join(row[number] for number in used) + " |" for row in cells]
    return "\n".join(lines)


def _figure(spread: Spread | None, unit: str) -> str:
    return "" if spread is None else f"{spread.median:,.1f} {unit.removesuffix(' a step')}"


def _ratio(spread: Spread | None, reference: str) -> str:
    return "" if spread is None or not reference else f"{spread.text(2)} of {reference}"


BEGIN, END = "<!-- made by: make bench -->", "<!-- end of what make bench made -->"


def put_into(page: Path, text: str) -> None:
    """Replace what stands between a page's two marks, or the whole of a file without them."""
    before, begin, rest = page.read_text().partition(BEGIN) if page.exists() else ("", "", "")
    _, end, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}" if begin and end else text)


def write_json(path: Path, rows: list[Row], where: dict[str, Any]) -> None:
    """All figures, with where they were taken."""
    found = {"machine": where, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
