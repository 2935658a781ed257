"""What setup.cfg can't say: the repository's address, and links that work outside it."""

import os
import re
from pathlib import Path

from setuptools import setup

# The one place for it; a release that GitHub builds (.github/workflows/release.yml) knows its own.
REPOSITORY = ""


def address() -> str:
    """Return the repository's address; empty where nobody has said it."""
    server, name = (os.environ.get(f"GITHUB_{word}", "") for word in ("SERVER_URL", "REPOSITORY"))
    return REPOSITORY or (f"{server}/{name}" if server and name else "")


def absolute(page: str, address: str, version: str) -> str:
    """Return a page whose links and pictures in the repository are those of the version's tag."""

    def link(found: re.Match) -> str:
        kind = "raw" if found["picture"] else "blob"
        return f"{found[0]}{address}/{kind}/v{version}/"

    return re.sub(r"(?P<picture>!?)\[[^\]]*\]\((?![a-z]+:|#)", link, page)


def with_badge(page: str, address: str) -> str:
    """Return a page with the badge of the tests' workflow, which only an address on GitHub has."""
    workflow = f"{address}/actions/workflows/tests.yml"
    return page.replace("<!-- tests badge -->", f"![tests]({workflow}/badge.svg)")


def metadata() -> dict:
    """Return what depends on the address."""
    root = Path(__file__).parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    text = (root / "fitkit" / "version.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]
    home = address()
    if not home:
        return {"long_description": readme}
    return {
        "long_description": with_badge(absolute(readme, home, version), home),
        "project_urls": {
            "Source": home,
            "Documentation": f"{home}/blob/v{version}/docs/index.md",
            "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
            "Issues": f"{home}/issues",
        },
    }


setup(**metadata())
