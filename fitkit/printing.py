"""Lines for people: nothing that is computed ends because a line can't be written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


def is_lost(error: BaseException) -> bool:
    """Whether an error says that a stream can't be written to: closed, full, or its reader gone."""
    # What Python raises for a closed file has no class of its own.
    return isinstance(error, OSError) or "closed file" in str(error)


@contextlib.contextmanager
def where_possible() -> Iterator[None]:
    """Surround what is written to a standard stream, which may be gone, as in a daemon."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not is_lost(error):
            raise


def say(text: object, *, end: str = "\n", stream: str = "stdout") -> None:
    """Write a line to a standard stream at once, where that is possible.

    Args:
        text: the line.
        end: what follows it.
        stream: `"stdout"` or `"stderr"`. A program may have replaced or closed it.
    """
    file = getattr(sys, stream)
    if file is None:
        return
    line = f"{text}{end}"
    with where_possible():
        try:
            file.write(line)
        except UnicodeEncodeError:  # a terminal of few characters
            encoding = getattr(file, "encoding", None) or "ascii"
            file.write(line.encode(encoding, "replace").decode(encoding))
        file.flush()
