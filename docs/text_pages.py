"""The site as text, for programs that read: llms.txt, llms-full.txt, and a .md beside each page.
What a page is about is in its HTML head, too, for searches and previews.

A page is its source, with links that hold on the site. Pages with directives, which are those of
the reference, are written from what Sphinx made of them.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.writers.text import TextTranslator

GUIDE = Path(__file__).parents[1] / "fitkit" / "guide.md"
SUMMARY = (
    "Keras's compile, fit, evaluate and predict for any PyTorch network, on one device or many, "
    "with exact resumes. The package is torch-fitkit, the import is fitkit."
)
ADVICE = (
    "Each page has its text beside it: quickstart.md for quickstart.html. [llms-full.txt]"
    "(llms-full.txt) has all pages. [guide.md](guide.md) is a short guide for coding agents, which "
    "`python -m fitkit guide` prints without a network."
)
PREVIEW = "pictures/curves.png"
"""What previews show, where the site has an address: make docs ARGS="-D html_baseurl=https://…/"."""
ABOUT = {
    "tasks/keep-runs": "Write settings, values, curves and weights of each run into a folder.",
    "tasks/is-it-better": "Find out over seeds which of several models is better; search settings.",
    "tasks/numbers-differ": "Find out why two runs or two machines give different numbers.",
    "tasks/run-hangs": "Read where each process is when nothing moves, and what to do.",
    "tasks/loss-is-nan": "Find where a loss stops being finite, or train without such updates.",
    "tasks/same-augmentations": "Random crops and noise, alike with any workers and devices.",
    "tasks/batch-does-not-fit": "What to try when memory runs out; batches in parts.",
    "tasks/uneven-texts": "Put texts of similar length into a batch, and ignore the padding.",
    "tasks/sklearn-pipeline": "Use a network as an estimator of scikit-learn.",
    "tasks/predict-much-data": "Write predictions to a file as they are computed.",
    "tasks/export-to-onnx": "Write a trained network to a file that runs without fitkit.",
    "tasks/slow-training": "Measure where the time of a step goes, and read what helps.",
    "data": "What x and y may be: arrays, loaders, dicts, streams, weights, sequences.",
    "api/model": "Model, its hooks, the functions beside it, History and the errors.",
    "api/callbacks": "Every class of fitkit.callbacks.",
    "api/loggers": "Every class of fitkit.loggers.",
    "api/strategies": "Every class of fitkit.strategies, one for each way to use several devices.",
    "api/precisions": "Every class of fitkit.precisions.",
    "api/tools": "fitkit.tune, data, transforms, pictures, sklearn, typing and losses.",
    "api/seams": "What packages that extend fitkit use: a page for each kind, with its names.",
}
"""What llms.txt says of pages that don't begin with a sentence of what they are about."""

TOCTREE = re.compile(r"^```{toctree}\n.*?^```\n*", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


class Markdown(TextTranslator):  # type: ignore[misc]
    """Sphinx's text of a page, with Markdown's headings, code and names."""

    def visit_title(self, node: nodes.Element) -> None:
        if isinstance(node.parent, nodes.section):
            self.states[-1].append((0, ["", "#" * self.sectionlevel + " " + node.astext(), ""]))
            raise nodes.SkipNode
        super().visit_title(node)

    def visit_desc_signature(self, node: nodes.Element) -> None:
        name = (node.get("ids") or [node.get("fullname", "")])[0]
        marks = "#" * min(6, self.sectionlevel + 1)
        self.states[-1].append((0, ["", f"{marks} {name}", "", "```python"]))
        super().visit_desc_signature(node)

    def depart_desc_signature(self, node: nodes.Element) -> None:
        super().depart_desc_signature(node)
        self.states[-1].append((0, ["```", ""]))

    def visit_desc_content(self, node: nodes.Element) -> None:
        self.new_state(0)

    def visit_literal(self, node: nodes.Element) -> None:
        self.add_text("`")

    depart_literal = visit_literal

    def visit_literal_block(self, node: nodes.Element) -> None:
        self.new_state(0)
        self.add_text("```python\n")

    def depart_literal_block(self, node: nodes.Element) -> None:
        self.add_text("\n```")
        self.end_state(wrap=False)

    depart_doctest_block = depart_literal_block
    visit_doctest_block = visit_literal_block

    def visit_reference(self, node: nodes.Element) -> None:
        super().visit_reference(node)
        if self._page_of(node):
            self.add_text("[")

    def depart_reference(self, node: nodes.Element) -> None:
        if page := self._page_of(node):
            self.add_text(f"]({page}.md)")
        super().depart_reference(node)

    def _page_of(self, node: nodes.Element) -> str:
        """Return the page that a link leads to; empty for links to names in a page."""
        target = str(node.get("refuri", ""))
        is_page = node.get("internal") and target.endswith(".html")
        return target.removesuffix(".html") if is_page else ""

    def visit_rubric(self, node: nodes.Element) -> None:
        self.new_state(0)
        self.add_text("**")

    def depart_rubric(self, node: nodes.Element) -> None:
        self.add_text("**")
        self.end_state()


def rendered(app: Sphinx, page: str) -> str:
    """Return the Markdown of a page with directives, from what they made."""
    tree = app.env.get_and_resolve_doctree(page, app.builder)
    for node in [*tree.findall(nodes.comment), *tree.findall(addnodes.index)]:
        node.parent.remove(node)
    # viewcode's links to the code.
    for node in [n for n in tree.findall(nodes.inline) if "viewcode-link" in n.get("classes", ())]:
        node.parent.remove(node)
    writer = Markdown(tree, app.builder)
    tree.walkabout(writer)
    return re.sub(r"\n{3,}", "\n\n", writer.body).strip() + "\n"


def relinked(env: BuildEnvironment, page: str, text: str) -> str:
    """Return a page's source, whose links to pictures and files are those of the site."""
    above = posixpath.dirname(page)
    images = {str(file): f"_images/{entry[1]}" for file, entry in env.images.items()}
    downloads = {str(file): f"_downloads/{entry[1]}" for file, entry in env.dlfiles.items()}
    places = images | downloads

    def place(link: re.Match[str]) -> str:
        path, hash_sign, anchor = link[2].partition("#")
        if not path or "://" in path:
            return link[0]
        file = posixpath.normpath(posixpath.join(above, path))
        if file not in places:
            return link[0]
        found = posixpath.relpath(places[file], above or ".")
        return link[1] + found + hash_sign + anchor + link[3]

    parts = FENCE.split(text)
    return "".join(part if i % 2 else LINK.sub(place, part) for i, part in enumerate(parts))


def text_of(app: Sphinx, page: str) -> str:
    """Return the Markdown of a page."""
    source = TOCTREE.sub("", Path(app.env.doc2path(page)).read_text(encoding="utf-8"))
    if "```{" in source:
        return rendered(app, page)
    return relinked(app.env, page, source).strip() + "\n"


def in_order(env: BuildEnvironment, page: str) -> Iterator[str]:
    """Yield a page and those below it, as the navigation has them."""
    yield page
    for below in env.toctree_includes.get(page, ()):
        yield from in_order(env, below)


def sections(env: BuildEnvironment) -> Iterator[tuple[str, list[str]]]:
    """Yield the titles of the navigation's groups, each with its pages; first those without one."""
    groups = [list(in_order(env, page)) for page in env.toctree_includes[env.config.root_doc]]
    yield "Start", [page for page, *below in groups if not below]
    for pages in groups:
        if pages[1:]:
            yield env.titles[pages[0]].astext(), pages


def first_sentence(text: str) -> str:
    """Return what a page says of itself: the first sentence below its title, or nothing."""
    first = next((p for p in re.split(r"\n\s*\n", text.strip())[1:] if p.strip()), "")
    if not first or first[0] in "#|!`<-:":
        return ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(first.split()))
    sentence = re.split(r"(?<=[.!?:])\s", plain)[0].rstrip(".:")
    return sentence + "." * (sentence[-1:] not in "?!")


def write(app: Sphinx, failure: Exception | None) -> None:
    """Write all files of text beside the HTML pages that were built."""
    if failure is not None or app.builder.name != "html":
        return
    out, env = Path(app.outdir), app.env
    pages = list(dict.fromkeys(in_order(env, env.config.root_doc)))
    texts = {page: text_of(app, page) for page in pages}
    for page, text in texts.items():
        target = out / f"{page}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    if GUIDE.is_file():
        shutil.copy(GUIDE, out / GUIDE.name)
    lines = [f"# {app.config.project}", "", f"> {SUMMARY}", "", ADVICE]
    for caption, names in sections(env):
        lines += ["", f"## {caption}", ""]
        for page in names:
            about = ABOUT.get(page) or first_sentence(texts[page])
            lines.append(f"- [{env.titles[page].astext()}]({page}.md)" + (about and f": {about}"))
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    whole = "\n".join(f"<!-- {page}.md -->\n\n{text}" for page, text in texts.items())
    (out / "llms-full.txt").write_text(whole, encoding="utf-8")


def point_to(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Say in the page's HTML head what it is about, and where its text is."""
    if tree is None:
        return
    source = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
    about = SUMMARY if page == app.config.root_doc else ABOUT.get(page) or first_sentence(source)
    title = app.env.titles[page].astext()
    said = {"og:title": title, "og:site_name": app.config.project, "og:type": "website"}
    if base := app.config.html_baseurl:  # a preview takes whole addresses alone
        said["og:url"] = posixpath.join(base, f"{page}.html")
        if picture := app.env.images.get(PREVIEW):
            said["og:image"] = posixpath.join(base, f"_images/{picture[1]}")
    tags = [f'<meta property="{name}" content="{escape(text)}" />' for name, text in said.items()]
    if about:
        shown = escape(about.replace("`", ""))
        tags.append(f'<meta name="description" property="og:description" content="{shown}" />')
    name = posixpath.basename(page)
    tags.append(f'<link rel="alternate" type="text/markdown" href="{name}.md" />')
    context["metatags"] = context.get("metatags", "") + "".join(tags)


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx call what is here."""
    app.connect("build-finished", write)
    app.connect("html-page-context", point_to)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
