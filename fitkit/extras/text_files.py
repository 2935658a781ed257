"""Text files that grow during training: tables (CSV) and JSON lines."""

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
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.seams.files import is_url, refuse_url, remote, remove_abandoned, replacing

ABSENT = "NA"
"""The cell for a value that a row lacks."""

UNKNOWN = "backslashreplace"
"""How text that UTF-8 can't encode (half of a surrogate pair) is written: `\\ud800`."""


class TextFile:
    """A file of complete lines, however the writing process ended.

    Args:
        path: the file, in an existing folder, or its URL. A file that can't be appended to is
            rewritten each time.
        key: the column with a growing number: the epoch or the step.
    """

    def __init__(self, path: Path | str, key: str) -> None:
        self.path = path
        self.key = key
        self._remote = ""  # the whole text of a file at a URL

    def begin(self, *, keeps: bool, before: int | None = None) -> None:
        """Start the file, or continue an existing one without a line that was cut short.

        Args:
            keeps: whether to continue.
            before: if given, keep only lines with a smaller number: the rest are made again.

        Raises:
            OSError: the file can't be written.
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
        """Write a line. It is in the file when this returns.

        Args:
            own: the line's number, and other columns of the file itself. None: there is none.
            values: values by name. A name that is also a column of the file itself gets a `_`.
        """
        raise NotImplementedError

    def _before(self, text: str, number: int) -> str:
        raise NotImplementedError

    def _text(self) -> str:
        """Return the file's text. An incomplete last line is removed from the file."""
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
    """A CSV file. A name that first appears later becomes a new column, with `NA` above."""

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
    """A file with a JSON object per line. NaN and infinity, which JSON lacks, become null."""

    def add(self, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.write({**own, **beside(own, values)})

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line without a number, such as the settings."""
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
    """Writes a line per epoch."""

    stops_alike = True
    _acts_alone = True
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
    """Writes a CSV table with a row per epoch: `epoch` (from 0), then the logs.

    Rank 0 writes after each epoch, so a crash loses none. A log that first appears in a later
    epoch gets a new column, with `NA` in the rows above. A log named `epoch` gets the column
    `epoch_`.

    Args:
        filename: the file, in an existing folder, or its URL (`s3://…`).
        separator: the character between columns. Default `","`.
        append: whether to continue an existing table, for example after a restart. Missing columns
            are added. A fit that begins with an epoch after 0 replaces the rows of the epochs that
            it repeats. Default False: each fit starts the file again.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.CSVLogger("epochs.csv")
        ... ])

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid.
        OSError: the file can't be written (when fit begins).
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        self.filename: Path | str = checked_place(filename, "filename")
        if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
            raise ConfigurationError(
                f"separator={separator!r} must be one character, like ',' or '\\t'."
            )
        append = check_flag("append", append)
        self.separator = separator
        self.append = append
        self._file = Table(self.filename, "epoch", separator)


class JSONLogger(_EpochFile):
    """Writes a line with a JSON object per epoch: `epoch` (from 0) and the logs.

    Rank 0 writes after each epoch. JSON has no NaN and no infinity, so they become null. A log
    named `epoch` is written as `epoch_`.

    Args:
        filename: the file, in an existing folder, or its URL (`s3://…`).
        append: whether to continue an existing file, as in `CSVLogger`. Default False.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.JSONLogger("epochs.jsonl")
        ... ])

    Raises:
        ArgumentTypeError: an argument is invalid.
        OSError: the file can't be written (when fit begins).
    """

    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        self.filename: Path | str = checked_place(filename, "filename")
        append = check_flag("append", append)
        self.append = append
        self._file = JSONLinesFile(self.filename, "epoch")


def checked_path(path: object, name: str = "path") -> Path:
    """Return a path as a `Path`.

    Raises:
        ArgumentTypeError: it isn't a path.
    """
    if isinstance(path, (str, os.PathLike)) and str(path):
        refuse_url(path, "this", "Give a folder's path, and copy what is in it.")
        return Path(path)
    raise ArgumentTypeError(f"{name}={describe(path)} must be a path.")


def checked_place(path: object, name: str = "path") -> Path | str:
    """Return a path as a `Path`, or a URL as it is.

    Raises:
        ArgumentTypeError: it is neither.
    """
    return path if isinstance(path, str) and is_url(path) else checked_path(path, name)


def _text_at(url: str) -> str:
    try:
        with remote.urls.downloaded(url) as local:
            text = Path(local).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    return text[: text.rfind("\n") + 1]


def beside(columns: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under names that differ from a table's own columns.

    `epoch` becomes `epoch_` (and `epoch_` becomes `epoch__`, so that no two are the same).
    """
    found = {}
    for name, value in values.items():
        clashes = str(name).rstrip("_") in columns
        found[writable(f"{name}_" if clashes else name)] = value
    return found


def writable(name: object) -> str:
    """Return a name as a UTF-8 file can hold it."""
    return str(name).encode("utf-8", UNKNOWN).decode("utf-8")


def replace_text(path: Path | str, text: str) -> None:
    """Rewrite a file, completely or not at all."""
    content = text.encode("utf-8", UNKNOWN)
    with replacing(path, len(content)) as file:
        file.write(content)


def _is_before(number: object, first: int) -> bool:
    """Whether a line's number is below `first`. A line without a number stays."""
    try:
        return int(number) < first  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return True


def _cell(value: Any) -> Any:
    """Return a value as a table cell; several numbers become a JSON list."""
    plain = plain_value(value)
    return json.dumps(plain) if isinstance(plain, (list, dict)) else plain


def as_json(value: Any) -> Any:
    """Return a value in a form that JSON allows."""
    plain = plain_value(value)
    if isinstance(plain, list):
        return [as_json(item) for item in plain]
    if isinstance(plain, dict):
        return {str(key): as_json(item) for key, item in plain.items()}
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain if isinstance(plain, (str, int, float, bool, type(None))) else str(plain)


def plain_value(value: Any) -> Any:
    """Arrays and tensors as numbers or lists. Other values stay as they are."""
    return value.tolist() if hasattr(value, "tolist") else value
