"""A table with a row for each record."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag
from fitkit.callbacks.epoch_files import (
    ABSENT,
    UNKNOWN,
    as_json,
    beside,
    is_before,
    replace_text,
)
from fitkit.loggers.base import Logger
from fitkit.loggers.rows import begin_file, checked_path

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
