"""The README is short, and its figures and the charts are those of the page of benchmarks."""

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


PAGE = (ROOT / "docs" / "benchmarks.md").read_text()


def program(name):
    """A file of docs as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_those_of_the_benchmarks_page():
    wanted = program("readme_figures").table(PAGE)
    assert wanted.count(" .. ") > 2
    assert wanted in (ROOT / "README.md").read_text(), "make pictures writes the new ones"


def test_the_charts_are_those_of_the_benchmarks_page():
    for name, text in program("make_charts").charts(PAGE).items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == text, "make pictures"
        assert f"(pictures/{name})" in PAGE


def test_what_a_chart_says_is_what_its_table_says():
    table = """
### step

| | | wall | CPU | wall ÷ | CPU ÷ | calls |
|---|---|---|---|---|---|---|
| small | careful | 9 | 9 | 9 | 1.07 [1.00 .. 1.10] of careful | 9 |
| small | **fitkit** | 9 | 9 | 9 | 0.25 [0.20 .. 0.40] of careful | 9 |
| small | **fitkit** | 9 | 9 | 9 | 0.99 [0.90 .. 1.40] of tuned | 9 |
| large | naive | 9 | 9 | 9 | 5.00 [5.00 .. 5.00] of careful | 9 |
"""
    charts = program("make_charts")
    ours, one = charts.contenders(table, "step", "small", "careful")
    assert (ours.name, ours.median, ours.low, ours.high) == ("fitkit", 0.25, 0.2, 0.4)
    assert (one.name, one.median, one.kind) == ("careful loop", 1, "loop")
    drawn = charts.chart("", {"": [ours, one]})
    (small, large) = (float(width) for width in re.findall(r'<rect.*?width="([\d.]+)"', drawn))
    assert abs(small / large - 0.25) < 0.001


def test_it_is_read_in_a_minute_and_ends_with_the_licence():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 142 and "LICENSE" in lines[-1]
