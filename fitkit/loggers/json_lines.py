"""A file with a JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag
from fitkit.callbacks.epoch_files import as_json, beside
from fitkit.loggers.base import Logger
from fitkit.loggers.rows import begin_file, checked_path, without_later_rows


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
