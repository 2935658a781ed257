"""The texts of `python -m fitkit explain`, and the links at the top of docs/troubleshooting.md,
made from its sections.

python docs/make_codes.py            # or: make pictures; writes fitkit/codes.json and the links
python docs/make_codes.py --check    # status 1 where they are others
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
TEXTS = ROOT / "fitkit" / "codes.json"


SECTION = re.compile(
    r"^### (?P<code>FK\d+): (?P<title>.*)\n(?P<text>(?:(?!##|<a id).*\n?)*)", re.MULTILINE
)
LINKS = re.compile(
    r"(<!-- made by docs/make_codes.py -->\n).*?(<!-- end of what docs/make_codes.py made -->)",
    re.S,
)
BLOCK = re.compile(r"^```.*\n((?:.*\n)*?)^```$|((?:^(?!```).+\n?)+)", re.MULTILINE)


def plain(text: str) -> str:
    """Return Markdown as a terminal shows it: a link is its words, and the page in brackets.

    A link that stands in brackets already loses them, and one within the page is its words alone.
    """

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        return words if target.startswith("#") else f"{words} (docs/{target})"

    text = re.sub(r" \(\[([^\]]+)\]\(([^#)][^)]*)\)\)", r" (docs/\2)", " ".join(text.split()))
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, text)
    return re.sub(r"`|\*\*", "", text)


def sections() -> dict[str, tuple[str, str]]:
    """Return each code's title and text, as the page has them."""
    found = SECTION.finditer(PAGE.read_text("utf-8"))
    return {one["code"]: (one["title"], one["text"]) for one in found}


def texts() -> dict[str, dict[str, str | list[str]]]:
    """Return each code's message, as the page quotes it, and the paragraphs below it.

    An example is a paragraph, too: its lines, each after four blanks.
    """
    found: dict[str, dict[str, str | list[str]]] = {}
    for code, (_, section) in sections().items():
        (_, quoted), *blocks = BLOCK.findall(section)
        found[code] = {
            "message": "; ".join(re.findall(r"`([^`]+)`", quoted)),
            "text": [
                textwrap.indent(example.rstrip(), " " * 4) if example else plain(paragraph)
                for example, paragraph in blocks
            ],
        }
    return dict(sorted(found.items()))


def with_links(page: str) -> str:
    """Return the page with a link to each code at its top: sections go by topic, these in order."""
    links = {code: f"[{code}](#{code.lower()})" for code in sorted(sections())}
    tens = itertools.groupby(links, key=lambda code: code[:-1])
    lines = "".join(f"- {' '.join(links[code] for code in ten)}\n" for _, ten in tens)
    return LINKS.sub(lambda found: f"{found[1]}{lines}{found[2]}", page)


def main() -> int:
    wanted = {
        TEXTS: json.dumps(texts(), indent=1, ensure_ascii=False) + "\n",
        PAGE: with_links(PAGE.read_text("utf-8")),
    }
    if "--check" in sys.argv:
        others = [path for path, text in wanted.items() if text != path.read_text("utf-8")]
        for path in others:
            print(f"{path.name} isn't what docs/troubleshooting.md says: make pictures")
        return int(bool(others))
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
