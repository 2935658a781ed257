"""Every Python block in README and docs runs, in order, each page in its own folder."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
BLOCK = re.compile(r"^```python(?: needs ([\w, ]+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        needs = (block.group(1) or "").replace(",", " ").split()
        if not all(map(importlib.util.find_spec, needs)):
            continue
        line = text[: block.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + block.group(2), str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_page_on_losses_and_metrics_names_all_of_them():
    from fitkit.losses.names import LOSSES
    from fitkit.metrics.catalogue import NAMES

    text = (ROOT / "docs" / "losses-and-metrics.md").read_text()
    absent = [name for registry in (LOSSES, NAMES) for name in registry if f"`{name}`" not in text]
    assert not absent
