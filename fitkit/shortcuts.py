"""Shorter ways to the numbers that a longer way gives, too."""

from __future__ import annotations


class Shortcut:
    """A shorter way. Its owner asks whether it is on; the longer way serves all cases.

    Tests switch each one off, and compare. What a user chooses, such as `jit_compile`, isn't one.

    Args:
        name: what it does, in a few words.

    Attributes:
        is_on: True, except in tests.
    """

    known: list[Shortcut] = []  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_on: bool = True
        self.known.append(self)
