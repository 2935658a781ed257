"""The texts of `python -m fitkit explain`, made from docs/troubleshooting.md.

python docs/make_codes.py            # or: make pictures; writes fitkit/codes.json
python docs/make_codes.py --check    # status 1 where the file has others
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
TEXTS = ROOT / "fitkit" / "codes.json"


def plain(text: str) -> str:
    """Return Markdown as a terminal shows it: a link is its words, and the page in brackets.

    A link that stands in brackets already loses them.
    """

    def link(found: re.Match[str]) -> str:
        return f"{found[1]} (docs/{found[2]})"

    text = re.sub(r" \(\[([^\]]+)\]\(([^)]+)\)\)", r" (docs/\2)", text)
    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, text).replace("`", "").strip()


def texts() -> dict[str, dict[str, str]]:
    """Return each code's message, as the page quotes it, and the page's cause and fix."""
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        message, anchor, rest = line.partition('<a id="fk')
        if not anchor or not line.startswith("| "):
            continue
        code, _, text = rest.partition(" | ")
        quoted = "; ".join(re.findall(r"`([^`]+)`", message))
        found[code.rpartition(">")[2].strip()] = {
            "message": quoted,
            "text": plain(text.strip().removesuffix("|")),
        }
    return dict(sorted(found.items()))


def main() -> int:
    wanted = json.dumps(texts(), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv:
        if wanted != TEXTS.read_text("utf-8"):
            print("fitkit/codes.json isn't what docs/troubleshooting.md says: make pictures")
            return 1
        return 0
    TEXTS.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
