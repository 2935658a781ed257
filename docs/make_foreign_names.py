"""The tables of docs/foreign-names.md, made from fitkit/foreign_names.json.

python docs/make_foreign_names.py            # or: make pictures; writes them into the page
python docs/make_foreign_names.py --check    # status 1 where the page has others
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "foreign-names.md"
NAMES = ROOT / "fitkit" / "foreign_names.json"
MARK = "<!-- from fitkit/foreign_names.json: make pictures -->"
PEERS = (
    "Keras", "Lightning", "Accelerate", "transformers", "skorch", "PyTorch",
    "scikit-learn and XGBoost",
)  # fmt: skip
OPEN, CLOSED = "([{", ")]}"


def marked(sentence: str) -> str:
    """Return a sentence with its code as such: words with signs of code, until brackets close."""
    found: list[str] = []
    words = sentence.split(" ")
    while words:
        word = words.pop(0)
        if words and words[0] in ("=", "=="):
            word = " ".join([word, words.pop(0), words.pop(0)])
        if not re.search(r"""[\w.)][(\[{]|[=_{\["]|\w\.\w""", word):
            found.append(word)
            continue
        while words and sum(map(word.count, OPEN)) > sum(map(word.count, CLOSED)):
            word += " " + words.pop(0)
        code, end = re.fullmatch(r"(.*?)((?:'s)?[.,;:]*)", word).groups()
        if code.endswith(")") and "(" not in code:
            code, end = code[:-1], ")" + end
        found.append(f"`{code}`{end}")
    return " ".join(found)


def shown(places: list[str], name: str) -> str:
    """Return a name as people write it: an argument, or an attribute of each place."""
    if places == ["metric"]:
        return f'`compile(metrics=["{name}"])`'
    if places == ["callback"]:
        return f'`fit(callbacks=["{name}"])`'
    if places[0] in ("lr_scheduler", "loss", "optimizer"):
        return f'`compile({places[0]}="{name}")`'
    attributes = [f"{place}.{name}" for place in places if place.startswith("fitkit")]
    if attributes:
        return ", ".join(f"`{one}`".replace("fitkit.Model.", "model.") for one in attributes)
    if places == ["any verb"]:
        return f"`{name}=…` in any verb"
    if len(places) == 1:
        return f"`{places[0]}({name}=…)`"
    return f"`{name}=…` in {', '.join(f'`{place}`' for place in places)}"


def table(rows: list[tuple[str, str]]) -> str:
    """Return two columns; names with one answer are one row."""
    by_answer: dict[str, list[str]] = {}
    for label, sentence in rows:
        by_answer.setdefault(sentence, []).append(label)
    lines = ["| You write | Here |", "|---|---|"]
    for text, labels in by_answer.items():
        lines.append(f"| {together(labels)} | {marked(text)} |")
    return "\n".join(lines)


def together(labels: list[str]) -> str:
    """Return the names of a row; those of the same verbs share them."""
    by_place: dict[str, list[str]] = {}
    for label in labels:
        name, _, place = label.partition(" in ")
        by_place.setdefault(place, []).append(name)
    parts = [", ".join(names) + f" in {place}" * bool(place) for place, names in by_place.items()]
    return "; ".join(parts)


def tables() -> str:
    """All sections of the page."""
    data = json.loads(NAMES.read_text("utf-8"))
    sections = []
    for peer in PEERS:
        rows = [
            (shown(places.split(", "), name), sentence)
            for places, by_peer in data["names"].items()
            for name, sentence in by_peer.get(peer, {}).items()
        ]
        sections.append(f"## {peer}\n\n{table(rows)}")
    model, callback = data["model hooks"], data["callback hooks"]
    hooks = [(f"`{name}`", sentence) for name, sentence in model["instead"].items()]
    hooks += [(f"`{name}`", f"Write {ours}.") for name, ours in model["ours"].items()]
    sections.append(f"## Methods of a model\n\n{table(hooks)}")
    ours = {name: word for name, word in callback["ours"].items() if name != word}
    hooks = [(f"`{name}`", f"Write {word}.") for name, word in ours.items()]
    hooks += [(f"`{name}`", sentence) for name, sentence in callback["instead"].items()]
    sections.append(f"## Methods of a callback\n\n{table(hooks)}")
    return "\n\n".join(sections)


def main() -> int:
    text = PAGE.read_text("utf-8")
    wanted = f"{text.partition(MARK)[0]}{MARK}\n\n{tables()}\n"
    if "--check" in sys.argv:
        if wanted != text:
            print("docs/foreign-names.md isn't what foreign_names.json says: make pictures")
        return int(wanted != text)
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
