"""The charts of docs/benchmarks.md, drawn from its tables, so that each figure stands in one place.

python docs/make_charts.py            # or: make pictures; writes docs/pictures
python docs/make_charts.py --check    # status 1 where a chart has other figures than the page

They are SVG by hand and not matplotlib's: words stay words, and the colours follow the reader's
light or dark mode.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "pictures"
LOOPS = {"tuned": "tuned loop", "careful": "careful loop", "naive": "naive loop"}
WIDTH, ROW, BAR, LETTER = 500, 26, 14, 8.2
"""Pixels: of the chart, of a row, of a bar and of a letter. A phone shows it at three quarters."""
LOOK = """\
text { font: 13px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; }
.ours { font-weight: 600; }
rect { fill: #a9b1ba; } rect.loop { fill: #d4d9de; } rect.ours { fill: #0072b2; }
line { stroke: #59636e; stroke-width: 1.5; }
line.one { stroke-dasharray: 3 3; stroke-width: 1; opacity: 0.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8eb; } .small { fill: #a3abb5; }
  rect { fill: #6b7480; } rect.loop { fill: #444b54; } rect.ours { fill: #3fa0dc; }
  line { stroke: #c3cad2; }
}"""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A median with its quartiles; without them, both are the median."""

    name: str
    median: float
    low: float
    high: float
    shown: str

    @classmethod
    def of(cls, name: str, cell: str) -> Bar:
        """Return the bar of a cell such as `0.50 [0.48 .. 0.53] of careful`, or `983`."""
        found = re.match(r"([\d.,]+)(?: \[([\d.]+) \.\. ([\d.]+)\])?", cell)
        assert found, cell
        median = float(found[1].replace(",", ""))
        return cls(name, median, float(found[2] or median), float(found[3] or median), found[1])

    @property
    def kind(self) -> str:
        """Whose it is: `ours`, a `loop` of plain PyTorch, or another library's."""
        if "fitkit" in self.name or "ddp" in self.name:
            return "ours"
        return "loop" if "loop" in self.name else "other"


def rows(page: str, head: str) -> Iterator[list[str]]:
    """Yield the cells of the first table below a heading or line of a page."""
    lines = iter(page[page.index(f"\n{head}") :].splitlines()[2:])
    seen = False
    for line in lines:
        if line.startswith("|"):
            seen = True
            yield [cell.strip() for cell in line.strip().removeprefix("|").split("|")]
        elif seen:
            return


def contenders(page: str, table: str, task: str, of: str) -> list[Bar]:
    """Return the CPU time of each contender of a task of `make bench`, as a part of one's."""
    found = []
    for cells in rows(page, f"### {table}\n"):
        name = cells[1].strip("*")
        # A row of the reference itself compares two of its runs.
        if cells[0] == task and cells[5].endswith(f" of {of}") and name != of:
            found.append(Bar.of(LOOPS.get(name, name), cells[5]))
    one = Bar(LOOPS[of], 1, 1, 1, "1")
    return sorted([*found, one], key=lambda bar: (bar.median, bar.high))


def compiled(page: str) -> list[Bar]:
    """Return the first table of compiled steps."""
    short = {
        ", eager": "",
        "`": "",
        "jit_compile=True": "compiled",
        "steps_per_execution=32": "32 a call",
    }
    found = []
    for name, cell, *_ in list(rows(page, "## Compiled steps\n"))[2:]:
        for long, instead in short.items():
            name = name.replace(long, instead)
        found.append(Bar.of(name, cell))
    return sorted([*found, Bar("tuned loop", 1, 1, 1, "1")], key=lambda bar: bar.median)


def memory(page: str) -> list[Bar]:
    """Return what the ranks of each strategy take beyond a run with little data."""
    found = list(rows(page, "### Memory\n"))[2:]
    return [Bar.of(cells[0].replace("`", ""), cells[4]) for cells in found]


def chart(title: str, groups: dict[str, list[Bar]], *, unit: str = "", one: bool = True) -> str:
    """Return bars as SVG: a line under each group's head, a dashed line at 1 if wanted."""
    everyone = [bar for bars in groups.values() for bar in bars]
    names = round(LETTER * max(len(bar.name) for bar in everyone)) + 12
    room = LETTER * max(len(bar.shown + unit) for bar in everyone) + 14
    scale = (WIDTH - names - room) / max(bar.high for bar in everyone)
    parts, y = [], 4
    for head, bars in groups.items():
        if head:
            parts.append(f'<text class="small" x="0" y="{y + 16}">{escape(head)}</text>')
            y += ROW
        if one:
            x = names + scale
            end = y + ROW * len(bars)
            parts.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{end}"/>')
        for bar in bars:
            middle, weight = y + ROW / 2, f' class="{bar.kind}"'
            left, right = names + scale * bar.low, names + scale * bar.high
            name = f'x="{names - 8}" y="{middle + 4.5}" text-anchor="end"'
            parts.append(f"<text{weight} {name}>{escape(bar.name)}</text>")
            size = f'width="{scale * bar.median:.1f}" height="{BAR}" rx="2"'
            parts.append(f'<rect{weight} x="{names}" y="{middle - BAR / 2}" {size}/>')
            if bar.high > bar.low:
                ends = f'x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"'
                parts.append(f"<line {ends}/>")
            place = f'x="{right + 7:.1f}" y="{middle + 4.5}"'
            parts.append(f"<text{weight} {place}>{bar.shown}{unit}</text>")
            y += ROW
        y += 6
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
    head += f' height="{y}" role="img">\n<title>{escape(title)}</title>\n<style>\n{LOOK}\n</style>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def charts(page: str) -> dict[str, str]:
    """Return each chart by its file's name."""
    inference = {
        task: contenders(page, "inference", task, "tuned")
        for task in ("evaluate, batches of 32", "predict, batches of 32")
    }
    step = contenders(page, "step", "Adam, accuracy, no display", "careful")
    return {
        "cost-of-a-step.svg": chart("CPU time of a step ÷ a careful loop's", {"": step}),
        "compiled.svg": chart("CPU time of a step ÷ the tuned loop's", {"": compiled(page)}),
        "evaluation.svg": chart("CPU time of a batch ÷ the tuned loop's", inference),
        "memory.svg": chart(
            "Memory of all ranks for 500 MB of data", {"": memory(page)}, unit=" MB", one=False
        ),
    }


def main() -> int:
    drawn = charts(PAGE.read_text())
    if "--check" in sys.argv:
        old = [name for name, text in drawn.items() if (PICTURES / name).read_text() != text]
        if old:
            print(f"{', '.join(old)}: other figures than docs/benchmarks.md: make pictures")
        return int(bool(old))
    for name, text in drawn.items():
        (PICTURES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
