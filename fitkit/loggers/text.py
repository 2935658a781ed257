"""Values logged to text files: a table (CSV), and JSON by lines."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag, describe
from fitkit.callbacks.text_files import (
    ABSENT,
    UNKNOWN,
    as_json,
    beside,
    is_before,
    replace_text,
    whole_lines,
)
from fitkit.checkpoint.atomic import remove_abandoned
from fitkit.errors import ArgumentTypeError
from fitkit.loggers.base import Logger


def checked_path(path: object, name: str = "path") -> Path:
    """A path as an object.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(path, (str, os.PathLike)) and str(path):
        return Path(path)
    raise ArgumentTypeError(f"{name}={describe(path)} must be a path.")


def begin_file(path: Path, *, keeps: bool) -> None:
    """Make a file that can be written: empty, or as it is but for a line that was cut short."""
    remove_abandoned(path.parent, path.name, folders=False)
    with path.open("a" if keeps else "w", encoding="utf-8"):
        pass
    if keeps:
        whole_lines(path)


def without_later_rows(path: Path, step: int, step_in: Callable[[str], object]) -> None:
    """Drop a file's lines whose step comes after `step`: they will be made again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if is_before(step_in(line), step + 1)]
    if len(kept) < len(lines):
        replace_text(path, "".join(kept))


FIRST = ["step", "epoch"]


class CSV(Logger):
    """Writes a table: `step`, `epoch` (`NA` between epochs' ends), then the values.

    A value called `step` or `epoch` is in the column `step_` or `epoch_`.

    The settings go to a second file, `<name>.hyperparameters.json`. A name that first appears
    later becomes a new column, with `NA` in the rows above. A training that is resumed goes on
    with the table, without the rows that it makes again.

    Args:
        path: the file; its folder must be there.
        update_freq: when to write; see `Logger`.
        append: whether a training that begins anew goes on with the table that is there, too.
            Default False: it begins the file anew.

    Raises:
        ArgumentTypeError, ConfigurationError: arguments that can't be.
        OSError: when fit begins, a file that can't be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        update_freq: str | int = "epoch",
        *,
        append: bool = False,
    ) -> None:
        super().__init__(update_freq)
        self.path: Path = checked_path(path)
        check_flag("append", append)
        self.append = append
        self._columns: list[str] = []

    @property
    def hyperparameters_path(self) -> Path:
        """The file with the settings."""
        return self.path.with_suffix(".hyperparameters.json")

    def start(self) -> None:
        keeps = self.append or self.resumes
        begin_file(self.path, keeps=keeps)
        rows = self._rows()
        self._columns = list(rows[0]) if rows else list(FIRST)
        if self.resumes:
            rows = [row for row in rows if is_before(row.get("step"), self.step + 1)]
        self._rewrite(rows)

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        replace_text(self.hyperparameters_path, json.dumps(as_json(values), indent=2) + "\n")

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        row: dict[str, Any] = {"step": step, "epoch": ABSENT if epoch is None else epoch}
        row |= beside(FIRST, values)
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._rows()
            self._columns = [*self._columns, *new]
            self._rewrite(rows)
        with self.path.open("a", encoding="utf-8", errors=UNKNOWN, newline="") as file:
            self._writer(file).writerow(row)

    def _rows(self) -> list[dict[str, Any]]:
        with self.path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self.path, text.getvalue())

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval=ABSENT, lineterminator="\n")


class JSONLines(Logger):
    """Writes a line for the settings (`{"hyperparameters": {…}}`), then one for each record.

    A record has `step`, `epoch` (null between epochs' ends) and the values; JSON knows no NaN and
    no infinity, they become null. Values called `step` or `epoch` are written as `step_` and
    `epoch_`. Each line is in the file as soon as it is written. A training
    that is resumed goes on with the file, without the records that it makes again.

    Args:
        path: the file; its folder must be there.
        update_freq: when to write; see `Logger`.
        append: whether a training that begins anew goes on with the file that is there, too.
            Default False: it begins the file anew.

    Raises:
        ArgumentTypeError, ConfigurationError: arguments that can't be.
        OSError: when fit begins, a file that can't be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        update_freq: str | int = "epoch",
        *,
        append: bool = False,
    ) -> None:
        super().__init__(update_freq)
        self.path: Path = checked_path(path)
        check_flag("append", append)
        self.append = append

    def start(self) -> None:
        begin_file(self.path, keeps=self.append or self.resumes)
        if self.resumes:
            without_later_rows(self.path, self.step, _step_in)
        self.connection = self.path.open("a", encoding="utf-8")

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        if not self.resumes:
            self._write({"hyperparameters": values})

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        self._write({"step": step, "epoch": epoch, **beside(["step", "epoch"], values)})

    def _write(self, record: dict[str, Any]) -> None:
        if self.connection is not None:
            self.connection.write(json.dumps(as_json(record)) + "\n")
            self.connection.flush()

    def finish(self, error: BaseException | None = None) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _step_in(line: str) -> object:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record.get("step") if isinstance(record, dict) else None
