"""The page on error messages quotes messages that fitkit has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("DataLoader worker (pid …) is killed by signal: Bus error",)
"""Messages of torch's own."""


def spoken(node):
    """A string of the code with an ellipsis for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
    )


def strings():
    """All strings of fitkit's code, docstrings too."""
    for path in sorted((ROOT / "fitkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                yield spoken(node)


def quoted():
    """The messages that the page quotes: the code in the first column of its tables."""
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


def pieces(message):
    """What a message has between its values."""
    return [piece.strip(" ,;:()") for piece in message.split("…") if piece.strip(" ,;:()")]


def test_each_message_on_the_page_is_one_that_fitkit_gives():
    known = list(strings())
    messages = [message for message in quoted() if message not in OTHERS]
    assert len(messages) > 40
    absent = [
        message
        for message in messages
        if not any(all(piece in text for piece in pieces(message)) for text in known)
    ]
    assert not absent
