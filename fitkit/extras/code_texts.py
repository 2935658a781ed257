"""What the codes of messages stand for: `python -m fitkit explain FK002`.

The texts are those of docs/troubleshooting.md, which `codes.json` brings to where there are no
pages (docs/make_codes.py).
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from fitkit.arguments import describe
from fitkit.errors import CODES, ConfigurationError

WIDTH = 88


def code_text(code: str) -> str:
    """Return what a code means, in lines of at most 88 characters.

    Args:
        code: such as `"FK002"`, in any case.

    Raises:
        ConfigurationError: no message has it.

    Example:
        >>> from fitkit.extras.code_texts import code_text
        >>> print(code_text("FK005"))
        FK005: arrays of different lengths
        <BLANKLINE>
        The message says: Give the same number of samples in each.
        <BLANKLINE>
        x, y and sample_weight have different first dimensions. The message has both lengths.
        <BLANKLINE>
        What to do: Find where one of them lost or gained samples...
    """
    known = code.strip().upper()
    if known not in CODES:
        raise ConfigurationError(
            f"{describe(code)} is no code of a message. python -m fitkit explain lists all codes."
        )
    file = Path(__file__).parents[1] / "codes.json"
    text = json.loads(file.read_text("utf-8"))[known]
    parts = [f"{known}: {CODES[known]}", f"The message says: {text['message']}", *text["text"]]
    return "\n\n".join(part if part.startswith(" ") else _in_lines(part) for part in parts)


def _in_lines(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def all_codes() -> str:
    """Return a line for each code."""
    return "\n".join(f"{code}  {title}" for code, title in CODES.items())
