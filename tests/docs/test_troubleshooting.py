"""The page on error messages quotes messages that fitkit has, and explains each code."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fitkit.__main__ import main
from fitkit.errors import CODES, with_code

ROOT = Path(__file__).parents[2]
PAGE = "docs/troubleshooting.md"
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


def sections():
    """The page's sections: (heading, the messages that it quotes: a paragraph of them alone)."""
    for section in re.split(r"^### ", (ROOT / PAGE).read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n\n")
        first = text.partition("\n\n")[0]
        is_quoted = re.fullmatch(r"(`[^`]+`(, )?)+", first)
        yield heading, re.findall(r"`([^`]+)`", first) if is_quoted else []


def quoted():
    """The messages that the page quotes."""
    for _, messages in sections():
        yield from messages


def coded():
    """The messages that end with a code: (code, message; "" where it is put together before)."""
    for path in sorted((ROOT / "fitkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            codes = [k.value for k in node.keywords if k.arg == "code"] + node.args[1:2]
            message = node.args[0] if node.args else None
            text = spoken(message) if isinstance(message, (ast.JoinedStr, ast.Constant)) else ""
            for code in codes:
                if isinstance(code, ast.Constant) and code.value in CODES:
                    yield code.value, text


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


def test_each_code_has_one_heading_with_its_title_below_its_anchor():
    text = (ROOT / PAGE).read_text()
    found = re.findall(r'^<a id="(\w+)"></a>\n\n### (FK\d+: .+)$', text, re.MULTILINE)
    wanted = Counter((code.lower(), f"{code}: {title}") for code, title in CODES.items())
    assert Counter(found) == wanted
    assert len(re.findall(r"<a id=|^### FK", text, re.MULTILINE)) == 2 * len(CODES)


def test_each_section_says_what_to_do():
    text = (ROOT / PAGE).read_text()
    assert text.count("\n**What to do:** ") == len(list(sections()))


def test_each_code_ends_a_message_somewhere():
    assert {code for code, _ in coded()} == CODES.keys()


def test_the_section_of_a_code_quotes_its_message():
    messages = list(coded())
    for heading, quotes in sections():
        code = heading.partition(":")[0]
        texts = [text for found, text in messages if found == code]
        parts = [pieces(quote) for quote in quotes]
        alike = any(all(p in text for p in part) for part in parts for text in texts)
        assert alike or not any(texts), (heading, texts)


def test_the_texts_of_the_wheel_are_those_of_the_page():
    script = ROOT / "docs" / "make_codes.py"
    done = subprocess.run([sys.executable, script, "--check"], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("code", CODES)
def test_the_command_at_a_messages_end_explains_its_code(code, capsys):
    command = re.search(r"python -m fitkit (.+)\)$", with_code("It can't be.", code))[1]
    assert main(command.split()) == 0
    title, message, *rest = capsys.readouterr().out.split("\n\n")
    assert title == f"{code}: {CODES[code]}" and message.startswith("The message says: ")
    assert any(part.startswith("What to do: ") for part in rest)
    prose = [line for part in rest for line in part.splitlines() if not line.startswith("    ")]
    assert not any(re.search(r"`|\*\*|\]\(", line) for line in prose)


def test_explain_takes_any_case_lists_all_codes_and_refuses_others(capsys):
    assert main(["explain", "fk002"]) == 0 and capsys.readouterr().out.startswith("FK002")
    assert main(["explain"]) == 0 and len(capsys.readouterr().out.splitlines()) == len(CODES)
    assert main(["explain", "FK9999"]) == 1 and "no code" in capsys.readouterr().err
