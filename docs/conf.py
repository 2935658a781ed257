"""Sphinx's settings for the site: `make docs` builds it into build/docs."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fitkit

project = "fitkit"
author = "fitkit maintainers"
copyright = "fitkit maintainers; MIT licence"
release = version = fitkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"fitkit {release}"
html_show_sourcelink = False

# GitHub's anchors, so that the same links work there and on the site.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Ranks", "Shapes"]
# Docstrings write `name` for code, as Markdown does.
default_role = "code"


def setup(app):
    app.connect("source-read", offer_pages_outside)


def offer_pages_outside(app, page, source):
    """Links to pages outside docs, which the site doesn't have, give the file."""
    source[0] = re.sub(r"\]\(((?:\.\./)+(?:benchmarks/)?[A-Z_]+\.md)\)", r"](path:\1)", source[0])
