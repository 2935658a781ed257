"""The benchmarks' command.

python -m benchmarks                     # all scenarios: about three quarters of an hour
python -m benchmarks step arrays --quick # two of them, roughly
python -m benchmarks --json results.json --markdown results.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.contest import PEERS_PYTHON, peers_there
from benchmarks.measuring import Row
from benchmarks.results import line, machine, markdown, put_into, write_json
from benchmarks.scenarios import SCENARIOS, Length


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="fitkit against loops by hand and other libraries."
    )
    names = ", ".join(SCENARIOS)
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=f"{names}; default: all")
    parser.add_argument("--quick", action="store_true", help="a rough look")
    parser.add_argument("--pairs", type=int, help="of runs for each contender")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--markdown", type=Path, help="write the tables to this file; between its marks, if any"
    )
    given = parser.parse_args()
    unknown = [name for name in given.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {names}")
    length = Length(
        pairs=given.pairs or (3 if given.quick else 11),
        share=0.2 if given.quick else 1.0,
        peers=not given.no_peers,
    )
    where = machine()
    print("  ".join(f"{key} {value}" for key, value in where.items()))
    if length.peers and not peers_there():
        print(f"No other libraries: there is no {PEERS_PYTHON} (make bench-peers sets it up).")
    rows: list[Row] = []
    for name in given.scenarios or SCENARIOS:
        print(f"\n{name}: {(SCENARIOS[name].__doc__ or '').strip()}")
        for row in SCENARIOS[name](length):
            rows.append(row)
            print(line(row), flush=True)
            # Written each time: what was measured stays where somebody ends it.
            if given.json:
                write_json(given.json, rows, where)
            if given.markdown:
                put_into(given.markdown, markdown(rows, where))


if __name__ == "__main__":
    main()
