"""Text files that grow while a training runs: tables (CSV), and JSON by lines."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag, describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.checkpoint.atomic import remove_abandoned, replacing
from fitkit.checkpoint.remote import downloaded, is_url, refuse_url
from fitkit.errors import ArgumentTypeError, ConfigurationError

ABSENT = "NA"
"""What a table has where a row lacks a value."""

UNKNOWN = "backslashreplace"
"""How what UTF-8 can't say (half of a surrogate pair) is written: `\\ud800`."""


class TextFile:
    """A file of lines that are there whole or not at all, however the writing process ended.

    Args:
        path: the file, whose folder must be there, or its URL: what can't be added to is written
            anew each time.
        key: the column with a number that grows: the epoch or the step.
    """

    def __init__(self, path: Path | str, key: str) -> None:
        self.path = path
        self.key = key
        self._remote = ""  # all of the file at a URL

    def begin(self, *, keeps: bool, before: int | None = None) -> None:
        """Begin the file anew, or go on with what is there but for a line that was cut short.

        Args:
            keeps: whether to go on.
            before: with it, only lines stay whose number comes before: those after are made again.

        Raises:
            OSError: it can't be written.
        """
        if isinstance(self.path, str):
            self._remote = _text_at(self.path) if keeps else ""
        else:
            remove_abandoned(self.path.parent, self.path.name, folders=False)
            with self.path.open("a" if keeps else "w", encoding="utf-8"):
                pass
        text = self._text()
        kept = text if before is None else self._before(text, before)
        if kept != text or isinstance(self.path, str):
            self._replace(kept)

    def add(self, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Write a line; it is in the file when this returns.

        Args:
            own: the line's number, and other columns of the file's own; None: there is none.
            values: by name. One that has the name of an own column is written with `_` after it.
        """
        raise NotImplementedError

    def _before(self, text: str, number: int) -> str:
        raise NotImplementedError

    def _text(self) -> str:
        """The file's text; a last line that was cut short is taken off the file."""
        if isinstance(self.path, str):
            return self._remote
        with self.path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        if len(whole) < len(text):
            self.path.write_text(whole, encoding="utf-8", newline="")
        return whole

    def _replace(self, text: str) -> None:
        if isinstance(self.path, str):
            self._remote = text
        replace_text(self.path, text)

    def _append(self, line: str) -> None:
        if isinstance(self.path, str):
            self._replace(self._remote + line)
            return
        with self.path.open("a", encoding="utf-8", errors=UNKNOWN, newline="") as file:
            file.write(line)


class Table(TextFile):
    """A CSV file; a name that first appears later becomes a new column, `NA` in the rows above."""

    def __init__(self, path: Path | str, key: str, separator: str = ",") -> None:
        super().__init__(path, key)
        self.separator = separator
        self._columns: list[str] = []

    def begin(self, *, keeps: bool, before: int | None = None) -> None:
        super().begin(keeps=keeps, before=before)
        self._columns, _ = self._read(self._text())

    def add(self, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        row = {name: ABSENT if value is None else value for name, value in own.items()}
        row |= {name: _cell(value) for name, value in beside(own, values).items()}
        new = [name for name in row if name not in self._columns]
        if new:
            _, rows = self._read(self._text())
            self._columns = [*self._columns, *new]
            self._replace(self._written(rows, header=True))
        self._append(self._written([row]))

    def _before(self, text: str, number: int) -> str:
        self._columns, rows = self._read(text)
        kept = [row for row in rows if _is_before(row.get(self.key), number)]
        return self._written(kept, header=True) if self._columns else text

    def _read(self, text: str) -> tuple[list[str], list[dict[str, Any]]]:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=self.separator)
        return list(reader.fieldnames or ()), list(reader)

    def _written(self, rows: list[dict[str, Any]], *, header: bool = False) -> str:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(
            text,
            self._columns,
            restval=ABSENT,
            extrasaction="ignore",
            delimiter=self.separator,
            lineterminator="\n",
        )
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class JSONLinesFile(TextFile):
    """A file with a JSON object in each line; NaN and infinity, which JSON lacks, become null."""

    def add(self, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.write({**own, **beside(own, values)})

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line without a number, such as settings."""
        self._append(json.dumps(as_json(record)) + "\n")

    def _before(self, text: str, number: int) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if _is_before(self._number_in(line), number))

    def _number_in(self, line: str) -> object:
        try:
            found = json.loads(line)
        except ValueError:
            return None
        return found.get(self.key) if isinstance(found, dict) else None


class _EpochFile(Callback):
    """Writes a line for each epoch."""

    stops_alike = True
    append: bool
    _file: TextFile

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.model.is_global_zero:
            first = self.params.get("initial_epoch", 0)
            self._file.begin(keeps=self.append, before=first or None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.model.is_global_zero:
            self._file.add({"epoch": epoch}, logs)


class CSVLogger(_EpochFile):
    """Writes a table with a row for each epoch: `epoch` (from 0), then the logs.

    Rank 0 writes, an epoch at a time, so that a crash loses none. A log that first appears in a
    later epoch gets a new column, with `NA` in the rows above. A log called `epoch` is in the
    column `epoch_`.

    Args:
        filename: the file, whose folder must be there, or its URL (`s3://…`).
        separator: what stands between the columns, one character. Default `","`.
        append: whether to go on with the table that is there (after a restart, say), adding the
            columns that it lacks. A fit that begins with a later epoch than 0 replaces the rows
            of the epochs that it makes again. Default False: each fit begins the file anew.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.CSVLogger("epochs.csv")
        ... ])

    Raises:
        ArgumentTypeError, ConfigurationError: arguments that can't be.
        OSError: when fit begins, a file that can't be written.
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        self.filename: Path | str = checked_place(filename, "filename")
        if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
            raise ConfigurationError(
                f"separator={separator!r} must be one character, like ',' or '\\t'."
            )
        check_flag("append", append)
        self.separator = separator
        self.append = append
        self._file = Table(self.filename, "epoch", separator)


class JSONLogger(_EpochFile):
    """Writes a line with a JSON object for each epoch: `epoch` (from 0) and the logs.

    Rank 0 writes, an epoch at a time. JSON knows no NaN and no infinity; they become null. A log
    called `epoch` is written as `epoch_`.

    Args:
        filename: the file, whose folder must be there, or its URL (`s3://…`).
        append: whether to go on with the file that is there, as in `CSVLogger`. Default False.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.JSONLogger("epochs.jsonl")
        ... ])

    Raises:
        ArgumentTypeError: arguments that can't be.
        OSError: when fit begins, a file that can't be written.
    """

    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        self.filename: Path | str = checked_place(filename, "filename")
        check_flag("append", append)
        self.append = append
        self._file = JSONLinesFile(self.filename, "epoch")


def checked_path(path: object, name: str = "path") -> Path:
    """A path as an object.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(path, (str, os.PathLike)) and str(path):
        refuse_url(path, "this", "Give a folder's path, and copy what is in it.")
        return Path(path)
    raise ArgumentTypeError(f"{name}={describe(path)} must be a path.")


def checked_place(path: object, name: str = "path") -> Path | str:
    """A path as an object, or a URL as it is.

    Raises:
        ArgumentTypeError: it is neither.
    """
    return path if isinstance(path, str) and is_url(path) else checked_path(path, name)


def _text_at(url: str) -> str:
    try:
        with downloaded(url) as local:
            text = Path(local).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    return text[: text.rfind("\n") + 1]


def beside(columns: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that are none of a table's own columns, as it can be written.

    `epoch` becomes `epoch_` (and `epoch_` `epoch__`, so that no two become one).
    """
    found = {}
    for name, value in values.items():
        clashes = str(name).rstrip("_") in columns
        found[writable(f"{name}_" if clashes else name)] = value
    return found


def writable(name: object) -> str:
    """A name as a file in UTF-8 can have it."""
    return str(name).encode("utf-8", UNKNOWN).decode("utf-8")


def replace_text(path: Path | str, text: str) -> None:
    """Write a file anew, whole or not at all."""
    content = text.encode("utf-8", UNKNOWN)
    with replacing(path, len(content)) as file:
        file.write(content)


def _is_before(number: object, first: int) -> bool:
    """Whether what a line has as its number is one before `first`; what is none stays."""
    try:
        return int(number) < first  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return True


def _cell(value: Any) -> Any:
    """A value as a cell of a table; several numbers as a JSON list."""
    plain = plain_value(value)
    return json.dumps(plain) if isinstance(plain, (list, dict)) else plain


def as_json(value: Any) -> Any:
    """A value as JSON can have it."""
    plain = plain_value(value)
    if isinstance(plain, list):
        return [as_json(item) for item in plain]
    if isinstance(plain, dict):
        return {str(key): as_json(item) for key, item in plain.items()}
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain if isinstance(plain, (str, int, float, bool, type(None))) else str(plain)


def plain_value(value: Any) -> Any:
    """Arrays and tensors as numbers or lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
