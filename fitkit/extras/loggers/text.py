"""Loggers that write text files: tables (CSV) and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag
from fitkit.extras.loggers.base import Logger, Unit
from fitkit.extras.text_files import (
    JSONLinesFile,
    Table,
    TextFile,
    as_json,
    checked_place,
    replace_text,
)


class _TextLogger(Logger):
    """Writes a line for each record to its file."""

    _kind: Callable[[Path | str, str], TextFile]
    _file: TextFile

    def __init__(
        self,
        path: str | os.PathLike[str],
        update_freq: str | int = "epoch",
        *,
        append: bool = False,
        step: Unit = "batches",
    ) -> None:
        super().__init__(update_freq, step)
        append = check_flag("append", append)
        self.append = append
        self._write_to(path)

    def _write_to(self, path: str | os.PathLike[str]) -> None:
        self.path: Path | str = checked_place(path)
        self._file = self._kind(self.path, "step")

    def start(self) -> None:
        after = self.next_step if self.resumes else None
        self._file.begin(keeps=self.append or self.resumes, before=after)

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        self._file.add({"step": step, "epoch": epoch}, values)


class CSV(_TextLogger):
    """Writes a CSV table: `step`, `epoch` (`NA` within epochs), then the values.

    Values named `step` or `epoch` get the columns `step_` or `epoch_`. The settings go to a second
    file, `<name>.hyperparameters.json`. A name that first appears later becomes a new column, with
    `NA` in the rows above. A resumed training continues the table, without the rows that it
    repeats.

    Args:
        path: the file, in an existing folder, or its URL (`s3://…`). A URL is rewritten for each
            record.
        update_freq: when to write; see `Logger`.
        append: whether a new training also continues an existing table. Default False: it starts
            the file again.
        step: what the steps count: `"batches"` (default) or `"updates"`; see `Logger`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.loggers.CSV("scalars.csv")
        ... ])

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid.
        OSError: the file can't be written (when fit begins).
    """

    _kind = Table

    @property
    def hyperparameters_path(self) -> Path | str:
        """The file with the settings."""
        if isinstance(self.path, str):
            return os.path.splitext(self.path)[0] + ".hyperparameters.json"
        return self.path.with_suffix(".hyperparameters.json")

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        replace_text(self.hyperparameters_path, json.dumps(as_json(values), indent=2) + "\n")


class JSONLines(_TextLogger):
    """Writes JSON lines: the settings (`{"hyperparameters": {…}}`), then one line per record.

    A record has `step`, `epoch` (null within epochs) and the values. JSON has no NaN and no
    infinity, so they become null. Values named `step` or `epoch` become `step_` or `epoch_`. Each
    line is in the file as soon as it is written. A resumed training continues the file, without the
    records that it repeats.

    Args:
        path: the file, in an existing folder, or its URL (`s3://…`). A URL is rewritten for each
            record.
        update_freq: when to write; see `Logger`.
        append: whether a new training also continues an existing file. Default False: it starts
            the file again.
        step: what the steps count: `"batches"` (default) or `"updates"`; see `Logger`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.loggers.JSONLines("scalars.jsonl")
        ... ])

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid.
        OSError: the file can't be written (when fit begins).
    """

    _kind = JSONLinesFile
    _file: JSONLinesFile

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        if not self.resumes:
            self._file.write({"hyperparameters": values})
