"""Sphinx's settings for the site: `make docs` builds it into build/docs."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from sphinx.pycode import ModuleAnalyzer

import fitkit

project = "fitkit"
author = "fitkit maintainers"
copyright = "fitkit maintainers; MIT licence"
release = version = fitkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "text_pages",
]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["fitkit.css"]
html_js_files = ["tables.js"]
html_search_scorer = str(Path(__file__).with_name("_static") / "search_order.js")
# Only the code is copied: no prompts, and no output between them.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_title = f"fitkit {release}"
html_logo = html_favicon = "_static/logo.svg"
html_show_sourcelink = False

# GitHub's anchors, so that the same links work there and on the site.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
# In the contents beside a page: `fit()`, not `Model.fit()`.
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"
autodoc_type_aliases = reference.ALIASES
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# One argument a line where they don't fit into one.
python_maximum_signature_line_length = 88
intersphinx_mapping = reference.inventories(Path(__file__).parents[1] / "build" / "inventories")
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Ranks", "Shapes"]
# Docstrings write `name` for code, as Markdown does.
default_role = "fitkit-code"


def setup(app):
    app.connect("viewcode-find-source", reference.source_of_strategies)
    reference.name_strategies()
    app.connect("source-read", offer_pages_outside)
    app.connect("source-read", name_headings)
    app.connect("autodoc-process-signature", reference.shorten)
    app.connect("autodoc-process-docstring", reference.list_names)
    ModuleAnalyzer.analyze = reference.one_signature(ModuleAnalyzer.analyze)
    app.add_role("fitkit-code", reference.Code())


def offer_pages_outside(app, page, source):
    """Links to pages outside docs, which the site doesn't have, give the file."""
    outside = r"\]\(((?:\.\./)+(?:benchmarks/(?:agents/)?)?[A-Z_]+\.md)\)"
    source[0] = re.sub(outside, r"](path:\1)", source[0])


def name_headings(app, page, source):
    """Make an anchor above a heading, as GitHub needs it, another name of the heading, by which
    the search finds it, too.
    """

    def named(found):
        return f"```{{index}} ! {found[1].upper()}\n```\n\n({found[1]})=\n"

    source[0] = re.sub(r'^<a id="([\w-]+)"></a>\n\n(?=#)', named, source[0], flags=re.M)
