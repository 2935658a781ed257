"""docs/text_pages.py, on a small site: llms.txt, llms-full.txt, and a .md beside each page."""

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

DOCS = Path(__file__).parents[2] / "docs"
INDEX = """\
# Small

The front page of a small site. It has two pages.

```{toctree}
:hidden:

first
api/index
```
"""
FIRST = """\
# The first page

Read [the reference](api/index.md) before: it lists all. Then read on.

![curves](pictures/curves.png) [a file](../notes.txt)

```python
link = "[kept](../notes.txt)"
```
"""
REFERENCE = """\
# Reference

Every function, from its docstring.

[The first page](../first.md) is before.

```{eval-rst}
.. autofunction:: small_code.double
```

```{toctree}
more
```
"""
MORE = '# More\n\nMore of "them".\n'
CODE = '''
def double(x: int, times: int = 1) -> int:
    """Return ``x`` doubled.

    Example::

        double(2)
    """
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the small site's HTML."""
    home = tmp_path_factory.mktemp("site")
    source, out = home / "docs", home / "out"
    (source / "api").mkdir(parents=True)
    (source / "index.md").write_text(INDEX)
    (source / "first.md").write_text(FIRST)
    (source / "api" / "index.md").write_text(REFERENCE)
    (source / "api" / "more.md").write_text(MORE)
    (source / "pictures").mkdir()
    shutil.copy(DOCS / "pictures" / "curves.png", source / "pictures")
    (home / "notes.txt").write_text("a note")
    (home / "small_code.py").write_text(CODE)
    settings = {
        "project": "small",
        "extensions": ["myst_parser", "sphinx.ext.autodoc", "text_pages"],
        "html_theme": "basic",
        "html_baseurl": "https://example.org/docs/",
    }
    with pytest.MonkeyPatch.context() as patch, patch_docutils(), docutils_namespace():
        patch.setattr(sys, "path", [str(DOCS), str(home), *sys.path])
        app = Sphinx(source, None, out, home / "trees", "html", settings, status=None)
        app.build()
    sys.modules.pop("small_code", None)
    return out


def test_llms_txt_has_a_title_a_summary_and_sections_of_links(site):
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# small" and lines[2].startswith("> ")
    start, reference = lines.index("## Start"), lines.index("## Reference")
    assert lines[start + 2] == "- [The first page](first.md): Read the reference before."
    about = "Every function, from its docstring."
    assert lines[reference + 2] == f"- [Reference](api/index.md): {about}"
    assert lines[reference + 3] == '- [More](api/more.md): More of "them".' and lines[:start]


def test_every_page_of_the_site_says_what_it_is_about(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import text_pages

    pages = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in DOCS.rglob("*.md")}
    unsaid = [
        name
        for name, path in pages.items()
        if not (text_pages.ABOUT.get(name) or text_pages.first_sentence(path.read_text()))
    ]
    assert unsaid == [], "begin with a sentence, or add them to ABOUT"
    assert text_pages.ABOUT.keys() <= pages.keys()


def test_every_page_has_its_text_beside_it_and_names_it(site):
    for page in ("index", "first", "api/index"):
        assert (site / f"{page}.md").is_file()
        name = page.rpartition("/")[2]
        assert f'type="text/markdown" href="{name}.md"' in (site / f"{page}.html").read_text()
    assert "toctree" not in (site / "index.md").read_text()


def test_a_page_says_in_its_head_what_it_is_about(site):
    head = (site / "api" / "more.html").read_text().partition("</head>")[0]
    assert (
        'name="description" property="og:description" content="More of &quot;them&quot;."' in head
    )
    assert '<meta property="og:title" content="More" />' in head
    assert 'property="og:url" content="https://example.org/docs/api/more.html"' in head
    assert 'property="og:image" content="https://example.org/docs/_images/curves.png"' in head


def test_links_in_a_text_lead_to_what_the_site_has(site):
    text = (site / "first.md").read_text()
    assert "[the reference](api/index.md)" in text and "![curves](_images/curves.png)" in text
    target = text.partition("[a file](")[2].partition(")")[0]
    assert (site / target).read_text() == "a note"
    assert '"[kept](../notes.txt)"' in text


def test_a_page_of_the_reference_has_signatures_and_docstrings(site):
    text = (site / "api" / "index.md").read_text()
    assert "eval-rst" not in text and "autofunction" not in text
    assert text.startswith("# Reference\n") and "\n## small_code.double\n" in text
    assert "small_code.double(x: int, times: int = 1) -> int" in text
    assert "[The first page](../first.md) is before." in text
    assert "Return `x` doubled." in text and "```python\ndouble(2)\n```" in text


def test_llms_full_txt_has_all_pages_in_reading_order(site):
    text = (site / "llms-full.txt").read_text()
    places = [text.index(title) for title in ("# Small", "# The first page", "# Reference")]
    assert places == sorted(places)
