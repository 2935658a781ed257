"""Sphinx's settings for the site: `make docs` builds it into build/docs."""

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fitkit.typing

project = "fitkit"
author = "fitkit maintainers"
copyright = "fitkit maintainers; MIT licence"
release = version = fitkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["fitkit.css"]
# Only the code is copied: no prompts, and no output between them.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_title = f"fitkit {release}"
html_show_sourcelink = False

# GitHub's anchors, so that the same links work there and on the site.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Signatures name the types that have names: `OptimizerArgument` instead of all optimizers.
autodoc_type_aliases = {
    name: f"fitkit.typing.{name}"
    for name in vars(fitkit.typing)
    if name[0].isupper() and f"\n{name}: TypeAlias = " in inspect.getsource(fitkit.typing)
}
autodoc_type_aliases["Callbacks"] = "fitkit.callbacks.base.Callbacks"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Ranks", "Shapes"]
# Docstrings write `name` for code, as Markdown does.
default_role = "code"


def setup(app):
    app.connect("source-read", offer_pages_outside)
    app.connect("autodoc-process-signature", shorten)


def offer_pages_outside(app, page, source):
    """Links to pages outside docs, which the site doesn't have, give the file."""
    source[0] = re.sub(r"\]\(((?:\.\./)+(?:benchmarks/)?[A-Z_]+\.md)\)", r"](path:\1)", source[0])


def shorten(app, what, name, obj, options, signature, returns):
    """What a call leaves out shows as `...`, and a type by its name, in unions too."""
    if signature is not None:
        named = re.sub(r"TypeAliasForwardRef\('[\w.]*?(\w+)'\)", r"\1", signature)
        return named.replace(" = UNSET", " = ..."), returns
    return None
