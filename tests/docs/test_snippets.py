"""Every Python block in README and docs runs, in order, each page in its own folder."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    ROOT / "fitkit" / "guide.md",
    *sorted((ROOT / ".github").rglob("*.md")),
]
BLOCK = re.compile(r"^```python(?: needs ([\w, ]+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OPTIONAL = ("matplotlib", "sklearn", "tensorboard")
"""Packages that pages use without a word, since most readers have them."""
MISSING = [package for package in OPTIONAL if importlib.util.find_spec(package) is None]
LANGUAGES = {"python", "sh", "ini", "json", "toml", "yaml", "{eval-rst}", "{toctree}"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def install(text, folder):
    """Leave a page's package as pip would: its first Python block, and the names of its project."""
    project = re.search(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL).group(1)
    module = re.search(r'py-modules = \["(\w+)"\]', project).group(1)
    (folder / f"{module}.py").write_text(BLOCK.search(text).group(2))
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:.+\n)+)', project, re.MULTILINE)
    lines = (f"[{group}]\n{names}".replace('"', "") for group, names in groups)
    metadata = folder / f"{module}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("".join(lines))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "```toml" in page.read_text():
        monkeypatch.syspath_prepend(tmp_path)
        install(page.read_text(), tmp_path)
    names = {"__name__": "__main__"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        needs = (block.group(1) or "").replace(",", " ").split()
        if not all(map(importlib.util.find_spec, needs)):
            continue
        line = text[: block.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + block.group(2), str(page), "exec")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, names)
        except ImportError as error:
            if any(package in str(error) for package in MISSING):
                pytest.skip(f"line {line} and what follows: {error}")
            raise


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_a_page_is_marked_as_such_so_that_it_runs(page):
    for language, content in re.findall(
        r"^```(\S*).*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        assert language in LANGUAGES or not language
        if not language:
            looks_like_python = r"^\w[\w., ]* = |^(import|from) \w+"
            assert not re.search(looks_like_python, content, re.MULTILINE), content


def anchors(page):
    """The anchors that GitHub and the site give a page's headings, and those that it has itself."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    made = {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in plain}
    return made | set(re.findall(r'^<a id="([\w-]+)"></a>$', text, re.MULTILINE))


def links(page):
    """Where a page's links lead, as (page, anchor); those to other sites are left out."""
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))
    for target in (first or second for first, second in LINK.findall(text)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    for target, anchor in links(page):
        assert target.exists(), target
        if anchor:
            assert anchor in anchors(target), f"{target.name}#{anchor}"


def test_every_page_of_the_site_is_in_its_navigation():
    front, pages = ROOT / "docs" / "index.md", set((ROOT / "docs").rglob("*.md"))
    below = {page: [] for page in pages}
    for page in pages:
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.M | re.S):
            names = [line for line in tree.splitlines() if line and line[0] != ":"]
            below[page] += [(page.parent / f"{name}.md").resolve() for name in names]
    listed = sum(below.values(), [])
    assert set(listed) == pages - {front} and len(listed) == len(set(listed))
    assert len(below[front]) <= 12, "a newcomer reads the first level; group the others"


def test_the_page_on_losses_and_metrics_names_all_of_them():
    from fitkit.losses.names import LOSSES
    from fitkit.metrics.named import NAMES

    text = (ROOT / "docs" / "losses-and-metrics.md").read_text()
    absent = [name for registry in (LOSSES, NAMES) for name in registry if f"`{name}`" not in text]
    assert not absent
