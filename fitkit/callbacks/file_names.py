"""File names with an epoch's numbers in them."""

from __future__ import annotations

import glob
import os
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitkit.arguments import describe
from fitkit.checkpoint import is_there
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.registry import nearest

_NUMBER = r" *(?:[-+]?\d[\d.,_]*(?:e[-+]?\d+)?%?|[-+]?inf%?|nan%?)"
"""What a field may look like in a name, for finding files again."""


class FileNames:
    """Names by a template like `"{epoch:02d}-{val_loss:.2f}.h5"`.

    Args:
        template: a path; what stands in braces is replaced by numbers of that name, in the given
            format. Braces in a name are written twice.
        suffixes: how the name may end.
        purpose: what the files hold, for messages.

    Attributes:
        fields: the names in braces.
        folder: where the files go, as far as it is the same for all of them.

    Raises:
        ArgumentTypeError, ConfigurationError: no path, fields without a name, another suffix.
    """

    def __init__(
        self, template: str | os.PathLike[str], suffixes: tuple[str, ...], purpose: str
    ) -> None:
        if not isinstance(template, (str, os.PathLike)) or not os.fspath(template):
            raise ArgumentTypeError(f"filepath={describe(template)} must be a path.")
        self.template = str(os.fspath(template))
        self._parts = _parsed(self.template)
        self.fields = [field for _, field, _ in self._parts if field is not None]
        self.suffix = os.path.splitext(self.template)[1]
        if self.suffix.lower() not in suffixes:
            raise ConfigurationError(
                f"filepath={self.template!r} can't be used: files with {purpose} end in "
                f"{' or '.join(suffixes)}."
            )
        fixed = self._parts[0][0] if self._parts else self.template
        self.folder = Path(os.path.dirname(fixed))

    def name(self, values: Mapping[str, Any], known: Mapping[str, Any]) -> str:
        """The name with an epoch's numbers.

        Args:
            values: a run's numbers: epoch, step.
            known: further ones; read only where the template names them.

        Raises:
            ConfigurationError: a field that nothing is known for, or of another kind.
        """
        text = []
        for literal, field, form in self._parts:
            text.append(literal)
            if field is None:
                continue
            if field in values:
                value = values[field]
            elif field in known:
                value = known[field]
            else:
                raise self._unknown(field, [*values, *known])
            text.append(_formatted(field, value, form))
        return "".join(text)

    def _unknown(self, field: str, names: list[str]) -> ConfigurationError:
        close = nearest(field, names)
        suggestion = f" Did you mean {' or '.join(close)}?" if close else ""
        return ConfigurationError(
            f"filepath={self.template!r} asks for {field!r}, but at this moment there are "
            f"{', '.join(names)}.{suggestion}"
        )

    def matches(self, path: str) -> bool:
        """Whether a path could be a name by this template."""
        pattern = "".join(
            re.escape(literal) + ("" if field is None else _NUMBER)
            for literal, field, _ in self._parts
        )
        return re.fullmatch(pattern, path) is not None

    def found(self) -> list[str]:
        """The files that are there with such names."""
        return [path for path in glob.glob(self._glob()) if self.matches(path) and is_there(path)]

    def folders(self) -> list[str]:
        """The folders that are there for such files."""
        return glob.glob(os.path.dirname(self._glob()) or os.curdir)

    def _glob(self) -> str:
        return "".join(
            glob.escape(literal) + ("" if field is None else "*")
            for literal, field, _ in self._parts
        )


def _parsed(template: str) -> list[tuple[str, str | None, str]]:
    """The template's pieces: text, the field after it (None at the end), the field's format."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"filepath={template!r} can't be read: {error}.") from None
    for _, field, form, conversion in pieces:
        if field == "" or conversion or "{" in (form or ""):
            raise ConfigurationError(
                f"filepath={template!r}: write names in the braces, like {{epoch:02d}} or "
                "{val_loss:.3f}."
            )
    return [(literal, field, form or "") for literal, field, form, _ in pieces]


def _formatted(field: str, value: Any, form: str) -> str:
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    try:
        return format(number, form)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"filepath has {{{field}:{form}}}, but {field} is {describe(number)}: {error}."
        ) from None
