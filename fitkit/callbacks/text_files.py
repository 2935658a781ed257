"""The epochs' logs in a file: as a table (CSV), or as one JSON object a line."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag, describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.checkpoint.atomic import remove_abandoned, replacing
from fitkit.errors import ArgumentTypeError, ConfigurationError

ABSENT = "NA"
"""What a table has where an epoch lacks a value."""

UNKNOWN = "backslashreplace"
"""How what UTF-8 can't say (half of a surrogate pair) is written: `\\ud800`."""


class CSVLogger(Callback):
    """Writes a table with a row for each epoch: `epoch` (from 0), then the logs.

    Rank 0 writes, an epoch at a time, so that a crash loses none. A log that first appears in a
    later epoch gets a new column, with `NA` in the rows above. A log called `epoch` is in the
    column `epoch_`.

    Args:
        filename: the file; its folder must be there.
        separator: what stands between the columns, one character. Default `","`.
        append: whether to go on with the table that is there (after a restart, say), adding the
            columns that it lacks. A fit that begins with a later epoch than 0 replaces the rows
            of the epochs that it makes again. Default False: each fit begins the file anew.

    Raises:
        ArgumentTypeError, ConfigurationError: arguments that can't be.
        OSError: when fit begins, a file that can't be written.
    """

    stops_alike = True

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        self.filename = _checked_path(filename)
        if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
            raise ConfigurationError(
                f"separator={separator!r} must be one character, like ',' or '\\t'."
            )
        check_flag("append", append)
        self.separator = separator
        self.append = append
        self._columns: list[str] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self.model.is_global_zero:
            return
        self._columns = []
        remove_abandoned(self.filename.parent, self.filename.name, folders=False)
        if not self.append:
            self.filename.write_text("", encoding="utf-8")
            return
        with self.filename.open("a", encoding="utf-8"):
            pass  # Says now whether it can be written.
        text = whole_lines(self.filename)
        self._columns = next(csv.reader(io.StringIO(text), delimiter=self.separator), [])
        first = self.params.get("initial_epoch", 0)
        if first and self._columns:
            self._rewrite([row for row in self._rows() if is_before(row.get("epoch"), first)])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if not self.model.is_global_zero:
            return
        cells = {name: _cell(value) for name, value in logs.items()}
        row = {"epoch": epoch, **beside(["epoch"], cells)}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        with self.filename.open("a", encoding="utf-8", errors=UNKNOWN, newline="") as file:
            self._writer(file).writerow(row)

    def _widen(self, new: list[str]) -> None:
        """Write the file again with more columns."""
        rows = self._rows()
        self._columns = [*self._columns, *new]
        self._rewrite(rows)

    def _rows(self) -> list[dict[str, Any]]:
        lines = io.StringIO(whole_lines(self.filename))
        return list(csv.DictReader(lines, delimiter=self.separator))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self.filename, text.getvalue())

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file,
            self._columns,
            restval=ABSENT,
            extrasaction="ignore",
            delimiter=self.separator,
            lineterminator="\n",
        )


class JSONLogger(Callback):
    """Writes a line with a JSON object for each epoch: `epoch` (from 0) and the logs.

    Rank 0 writes, an epoch at a time. JSON knows no NaN and no infinity; they become null. A log
    called `epoch` is written as `epoch_`.

    Args:
        filename: the file; its folder must be there.
        append: whether to go on with the file that is there, as in `CSVLogger`. Default False.

    Raises:
        ArgumentTypeError: arguments that can't be.
        OSError: when fit begins, a file that can't be written.
    """

    stops_alike = True

    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        self.filename = _checked_path(filename)
        check_flag("append", append)
        self.append = append

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self.model.is_global_zero:
            return
        remove_abandoned(self.filename.parent, self.filename.name, folders=False)
        with self.filename.open("a" if self.append else "w", encoding="utf-8"):
            pass
        lines = whole_lines(self.filename).splitlines(keepends=True)
        first = self.params.get("initial_epoch", 0)
        kept = [line for line in lines if is_before(_epoch_in(line), first)]
        if first and len(kept) < len(lines):
            replace_text(self.filename, "".join(kept))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if not self.model.is_global_zero:
            return
        values = {name: as_json(value) for name, value in logs.items()}
        line = json.dumps({"epoch": epoch, **beside(["epoch"], values)})
        with self.filename.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _checked_path(filename: object) -> Path:
    if isinstance(filename, (str, os.PathLike)) and str(filename):
        return Path(filename)
    raise ArgumentTypeError(f"filename={describe(filename)} must be a path.")


def beside(columns: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
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


def whole_lines(path: Path) -> str:
    """A file's text; a last line that a crash cut short is taken off the file."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        path.write_text(whole, encoding="utf-8", newline="")
    return whole


def replace_text(path: Path, text: str) -> None:
    """Write a file anew, whole or not at all."""
    content = text.encode("utf-8", UNKNOWN)
    with replacing(path, len(content)) as file:
        file.write(content)


def is_before(epoch: object, first: int) -> bool:
    """Whether what a file has as an epoch is one before `first`; what is none stays."""
    try:
        return int(epoch) < first  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return True


def _epoch_in(line: str) -> object:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found.get("epoch") if isinstance(found, dict) else None


def _cell(value: Any) -> Any:
    """A log as a cell of a table; several numbers as a JSON list."""
    plain = plain_value(value)
    return json.dumps(plain) if isinstance(plain, (list, dict)) else plain


def as_json(value: Any) -> Any:
    """A log as JSON can have it."""
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
