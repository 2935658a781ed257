"""The README is short, and its figures are those of the page of benchmarks."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def figures():
    """docs/readme_figures.py as a module."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "readme_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_those_of_the_benchmarks_page():
    wanted = figures().table((ROOT / "docs" / "benchmarks.md").read_text())
    assert wanted.count(" .. ") > 2
    assert wanted in (ROOT / "README.md").read_text(), "make pictures writes the new ones"


def test_it_is_read_in_a_minute_and_ends_with_the_licence():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and "LICENSE" in lines[-1]
