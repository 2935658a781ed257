"""Settings as plain values, for files and tables."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 200
"""Characters of a setting; places that keep them have limits."""


def plain_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Strings, numbers and flags by name.

    What is None has no entry; parts of dicts, and of lists of objects, have theirs: `loss.box`.
    Functions, classes and objects become their names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        found.update(_plain(str(name), value))
    return found


def _plain(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (list, dict)) for v in value):
        parts = enumerate(value)
    elif isinstance(value, (list, tuple)):
        return {name: ", ".join(map(name_of, value))[:LONGEST]} if value else {}
    else:
        return {name: value if isinstance(value, (int, float)) else name_of(value)[:LONGEST]}
    return plain_settings({f"{name}.{key}": part for key, part in parts})


def name_of(value: Any) -> str:
    """What a value is called: never its address, which differs from run to run."""
    if isinstance(value, (str, int, float)) or value is None:
        return str(value)
    if isinstance(value, functools.partial):
        given = [name_of(item) for item in value.args]
        given += [f"{name}={name_of(item)}" for name, item in value.keywords.items()]
        return f"{name_of(value.func)}({', '.join(given)})"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__
