"""Pages and docstrings are in plain English: short sentences, plain phrases, code that fits.

What is against the house's style is reported by a warning, since it misleads nobody. Names, codes,
links and programs that are wrong fail tests elsewhere.
"""

import ast
import re
import textwrap
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/move-your-code.md",
    "docs/training.md",
    "docs/results.md",
    "docs/other-tools.md",
    "docs/check-and-speed-up.md",
    "docs/about.md",
    "docs/from-keras.md",
    "docs/from-lightning.md",
    "docs/from-pytorch.md",
    "docs/data.md",
    "docs/callbacks.md",
    "docs/many-devices.md",
    "docs/accelerators.md",
    "docs/own-package.md",
    "docs/comparison.md",
    "docs/own-steps.md",
    "docs/losses-and-metrics.md",
    "docs/checkpoints.md",
    "docs/troubleshooting.md",
    "docs/sharded.md",
    "docs/logging.md",
    "docs/precision.md",
    "docs/lr-schedulers.md",
    "docs/notebooks.md",
    "docs/many-machines.md",
    "docs/ecosystem.md",
    "docs/networks-of-other-libraries.md",
    "docs/examples.md",
    "docs/export.md",
    "docs/serving.md",
    "docs/language-models.md",
    "docs/verify.md",
    "docs/own-strategies.md",
    "docs/engines.md",
    "docs/bagua.md",
    "docs/architecture.md",
    "docs/contributing.md",
    "docs/checkpoint-format.md",
    "docs/performance.md",
    "docs/benchmarks.md",
    "docs/faq.md",
    "docs/for-agents.md",
    "fitkit/guide.md",
    *sorted(f"docs/tasks/{page.name}" for page in (ROOT / "docs" / "tasks").glob("*.md")),
]
"""The pages that have been rewritten."""
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "fitkit").rglob("*.py"))
WORDS = 30
"""The longest that a sentence may be."""
COLUMN = 88
"""The characters of a line of code that the site shows without a scroll bar."""
BANNED = [
    "anew",
    "at hand",
    "dealt out",
    "go on",
    "goes on",
    "is dealt",
    "is told",
    "kin",
    "likewise",
    "nothing to speak of",
    "of ours",
    "of theirs",
    "of yours",
    "shall",
    "that are there",
    "that is there",
    "that there are",
    "unasked",
    "whoever",
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^ *(Args|Returns|Raises|Attributes|Ranks|Shapes|Yields): *$", re.MULTILINE)
ITEM = re.compile(r"^ *\*{0,2}[\w`][\w, *`]*: (?=\S)", re.MULTILINE)
"""The name before an entry of `Args:` and the like."""
CODE_OF_DOCSTRING = re.compile(
    r"^ *(Example|Reference)s?:.*?(?=^ *[A-Z]\w+: *$|\Z)", re.MULTILINE | re.DOTALL
)


def prose(text: str) -> list[str]:
    """Paragraphs, items of lists, headings and cells of tables, without markup.

    A piece of code is one word, however long, and its full stops end no sentence.
    """
    text = FENCED.sub("", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?m)^ *(#+|[-*]|\d+\.) ", "\n\n", text)
    text = re.sub(r"(?m)^\|(.*)\|$", lambda row: "\n\n" + row[1].replace("|", "\n\n"), text)
    pieces = (re.sub(r"[*_]", "", piece).split() for piece in re.split(r"\n\s*\n", text))
    return [" ".join(piece) for piece in pieces if piece]


def sentences(text: str) -> list[str]:
    """The sentences of a page, each on one line."""
    return [line for piece in prose(text) for line in re.split(r"(?<=[.!?…])\s+(?=[\w\"(])", piece)]


def docstrings(path: Path) -> list[str]:
    """The prose of a file's docstrings, without examples, references and names of arguments."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            text = textwrap.dedent(" " * node.col_offset + value.value)
            text = CODE_OF_DOCSTRING.sub("\n", text)
            found.append(ITEM.sub("\n\n", SECTION.sub("\n", text)))
    return found


def words(sentence: str) -> int:
    """How many words a sentence has; signs alone aren't words."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


class HouseStyle(UserWarning):
    """What a reader would rather have otherwise."""


def report(lines: list[str]) -> None:
    """Warn of what is against the house's style in these sentences."""
    found = [f"{words(line)} words: {line}" for line in lines if words(line) > WORDS]
    found += [
        f"{phrase!r}: {line}"
        for line in lines
        for phrase in BANNED
        if re.search(rf"\b{phrase}\b", line, re.IGNORECASE)
    ]
    if found:
        warnings.warn("\n".join(found), HouseStyle, stacklevel=2)


def test_a_sentence_is_measured_without_its_markup():
    text = "# Two words\n\nOne `a. b c` two.\nThree [four five](page.md) six!\n\n| a b | c. D |\n"
    found = sentences(text)
    assert found == ["Two words", "One code two.", "Three four five six!", "a b", "c.", "D"]
    assert [words(line) for line in ("one – two", "a/b: c")] == [2, 2]


def test_long_sentences_and_banned_phrases_are_reported():
    with pytest.warns(HouseStyle) as caught:
        report(["word " * (WORDS + 1), "It goes on.", "It continues."])
    (warning,) = caught
    assert str(warning.message).count("\n") == 1


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_in_plain_english(page):
    report(sentences((ROOT / page).read_text()))


def test_a_docstring_is_measured_without_names_and_examples(tmp_path):
    text = """Add a value.

    Args:
        name: the key. It is text.

    Example:
        >>> 1 + 1
        2
    """
    file = tmp_path / "file.py"
    file.write_text(f"def add():\n    {text!r}\n")
    assert sentences("\n\n".join(docstrings(file))) == ["Add a value.", "the key.", "It is text."]


@pytest.mark.parametrize("file", FILES)
def test_docstrings_are_in_plain_english(file):
    report([line for text in docstrings(ROOT / file) for line in sentences(text)])


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_column(page):
    blocks = "".join(CODE.findall((ROOT / page).read_text()))
    found = [line for line in blocks.splitlines() if len(line) > COLUMN]
    if found:
        warnings.warn("\n".join(found), HouseStyle, stacklevel=1)


def test_the_front_page_shows_the_program_of_the_readme():
    readme, index = ((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
    assert CODE.search(readme)[1] == CODE.search(index)[1]
