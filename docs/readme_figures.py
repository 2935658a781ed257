"""The README's table of figures, taken from docs/benchmarks.md, so that each stands in one place.

python docs/readme_figures.py            # or: make pictures; writes it into the README
python docs/readme_figures.py --check    # status 1 where the README has others
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TASK = "Adam, accuracy, no display"
BEGIN, END = "<!-- from docs/benchmarks.md: make pictures -->\n", "<!-- end -->\n"
ROWS = {
    "**fitkit**": "**fitkit**",
    "tuned": "a tuned loop",
    "Keras on JAX": "Keras on JAX",
    "Ignite": "Ignite",
    "Keras": "Keras",
    "Lightning": "Lightning",
}
"""The README's contenders: the tuned loop, the library that costs the least and the two that most
readers know. The page has all of them."""


def table(page: str) -> str:
    """Return a row for each of `ROWS`: CPU time and calls a step, the quickest first.

    A compiled step has no calls. The times aren't seconds, which change with the machine's mood
    between one contender and the next, but ratios of runs that took turns.
    """
    rows: dict[str, tuple[str, str]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if cells[0] == TASK and cells[1] in ROWS and cells[1] not in rows:
            calls = cells[7] if len(cells) > 7 else ""
            rows[cells[1]] = (cells[5].removesuffix(" of careful"), calls)
    order = sorted(rows, key=lambda name: _number(rows[name][0]))
    lines = ["| a step by | CPU time ÷ a careful loop's | Python and C calls |", "|---|---|---|"]
    lines += [f"| {ROWS[name]} | {rows[name][0]} | {rows[name][1]} |" for name in order]
    facts = r"^Measured (\S+): .*?(\d+ cores, load \S+), .*(torch [\d.]+)"
    measured = re.search(facts, page[page.index("\n### step\n") :], re.M)
    assert measured, "docs/benchmarks.md says nowhere when it was measured"
    return "\n".join(lines) + f"\n\nMeasured {measured[1]} on {measured[2]}, {measured[3]}.\n"


def _number(cell: str) -> float:
    """Return the first number in a cell."""
    return float(cell.split()[0].replace(",", ""))


def main() -> int:
    path = ROOT / "README.md"
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + table((ROOT / "docs" / "benchmarks.md").read_text()) + END + after
    if "--check" in sys.argv:
        if wanted != text:
            print("README.md has other figures than docs/benchmarks.md: make pictures")
        return int(wanted != text)
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
