"""fitkit's loggers under Lightning's names, with Lightning's main arguments."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from pathlib import Path
from typing import Any

from fitkit.arguments import check_flag, describe
from fitkit.errors import ArgumentTypeError
from fitkit.extras import urls
from fitkit.extras.loggers.base import Unit
from fitkit.extras.loggers.services import MLflow, WandB
from fitkit.extras.loggers.tensorboard import TensorBoard
from fitkit.extras.loggers.text import CSV
from fitkit.extras.text_files import checked_path, checked_place
from fitkit.seams.callbacks import run_of

NAME = "lightning_logs"
"""The default folder or experiment name."""


_NUMBERS: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
"""The numbers that the loggers of each run took, by folder: those of one `fit` share one."""


class _Versions:
    """Folders `<save_dir>/<name>/version_<n>`. Without a version, each new training has its own.

    A number is taken when `fit` begins, by making the folder, so that no other training gets it.
    Before, `folder` is the next free one. At a URL nobody can take a number: trainings that begin
    within the same moment may get the same.
    """

    def __init__(self, save_dir: Any, name: Any, version: Any) -> None:
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError(f"name={describe(name)} must be a string or None.")
        if isinstance(version, bool) or not isinstance(version, (int, str, type(None))):
            raise ArgumentTypeError(f"version={describe(version)} must be a number or a string.")
        place = checked_place(save_dir, "save_dir")
        self._is_url = isinstance(place, str)
        self._root = os.path.join(place, name) if name else os.fspath(place)
        self._is_given, self._is_taken = version is not None, False
        self._version: int | str = self._next() if version is None else version

    @property
    def folder(self) -> Path | str:
        version = self._version
        path = os.path.join(self._root, version if isinstance(version, str) else _named(version))
        return path if self._is_url else Path(path)

    def begin(self, run: Any, *, resumes: bool) -> None:
        """Take the number of a training that begins."""
        if self._is_given or (resumes and self._is_taken):
            return
        numbers = _NUMBERS.setdefault(run, {})
        if self._root not in numbers:
            numbers[self._root] = self._take()
        self._version, self._is_taken = numbers[self._root], True

    def _take(self) -> int:
        while True:
            number = self._next()
            if self._is_url:
                return number
            os.makedirs(self._root, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another training was faster
                os.mkdir(os.path.join(self._root, _named(number)))
                return number

    def _next(self) -> int:
        if self._is_url:
            files = urls.files_in(self._root, depth=3)
            there = [os.path.relpath(file, self._root).partition("/")[0] for file in files]
        else:
            there = os.listdir(self._root) if os.path.isdir(self._root) else []
        found = [re.fullmatch(r"version_(\d+)", entry) for entry in there]
        return max((int(match[1]) for match in found if match), default=-1) + 1


def _named(number: int) -> str:
    return f"version_{number}"


class TensorBoardLogger(TensorBoard):
    """`TensorBoard` with Lightning's arguments, folders and names.

    It writes to `<save_dir>/<name>/version_<n>`. There `loss`, `val_loss` and all other values are
    plotted over training steps, and so is `epoch`.

    Args:
        save_dir: the folder for all runs, or its URL.
        name: a folder in it, or None. Default `"lightning_logs"`.
        version: a number, or a folder's name. None (default) takes the next free number
            when `fit` begins, for each new training.
        log_graph: whether to write the net's modules. Default False.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.

    Example:
        >>> import fitkit
        >>> board = fitkit.loggers.TensorBoardLogger("logs", name="first")
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = NAME,
        version: int | str | None = None,
        log_graph: bool = False,
        *,
        update_freq: str | int = "epoch",
        step: Unit = "updates",
    ) -> None:
        self._versions = _Versions(save_dir, name, version)
        folder = self._versions.folder
        super().__init__(folder, write_graph=log_graph, update_freq=update_freq, step=step)

    def start(self) -> None:
        self._versions.begin(run_of(self.model), resumes=self.resumes)
        self.log_dir = self._versions.folder
        super().start()

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        super().log_scalars(values, step, epoch)
        if epoch is not None:
            self._writer("").add_scalar("epoch", epoch, step)

    def _writer(self, run: str) -> Any:
        return super()._writer("")

    def _first_new(self) -> int | None:
        return self.next_step if self.resumes else None

    def _curve(self, name: str) -> tuple[str, str]:
        return "", name

    def _moment(self, epoch: int, step: int) -> int:
        return step


class CSVLogger(CSV):
    """`CSV` with Lightning's arguments. It writes `<save_dir>/<name>/version_<n>/metrics.csv`.

    Args:
        save_dir: the folder for all runs, or its URL. Folders are created if needed.
        name: a folder in it, or None. Default `"lightning_logs"`.
        version: a number, or a folder's name. None (default) takes the next free number
            when `fit` begins, for each new training.
        update_freq: when to write; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.loggers.CSVLogger("logs", name="first")
        ... ])
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = NAME,
        version: int | str | None = None,
        *,
        update_freq: str | int = "epoch",
        step: Unit = "updates",
    ) -> None:
        self._versions = _Versions(save_dir, name, version)
        self.log_dir: Path | str = self._versions.folder
        super().__init__(os.path.join(self.log_dir, "metrics.csv"), update_freq, step=step)

    def start(self) -> None:
        self._versions.begin(run_of(self.model), resumes=self.resumes)
        self.log_dir = self._versions.folder
        self._write_to(os.path.join(self.log_dir, "metrics.csv"))
        if isinstance(self.log_dir, str):
            urls.make_folder(self.log_dir)
        else:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        super().start()


class WandbLogger(WandB):
    """`WandB` with Lightning's arguments.

    Args:
        name: the run's name.
        save_dir: the folder for wandb's files. None uses wandb's default.
        offline: whether to write files only, which `wandb sync` can send later. Default False.
        project: the project's name. None uses wandb's default.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument of `wandb.init`.

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.WandbLogger(project="digits")
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        offline: bool = False,
        project: str | None = None,
        *,
        update_freq: str | int = "epoch",
        step: Unit = "updates",
        **options: Any,
    ) -> None:
        offline = check_flag("offline", offline)
        given = {"name": name, "dir": save_dir, "mode": "offline" if offline else None}
        given = {key: value for key, value in given.items() if value is not None}
        super().__init__(project, update_freq, step=step, **{**given, **options})


class MLFlowLogger(MLflow):
    """`MLflow` with Lightning's arguments.

    Args:
        experiment_name: the experiment, created if needed. Default `"lightning_logs"`.
        run_name: the run's name. None lets MLflow choose one.
        tracking_uri: the server or database. None uses MLflow's own setting, else `save_dir`.
        save_dir: a folder instead of `tracking_uri`. Default None.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.MLFlowLogger("digits")
    """

    def __init__(
        self,
        experiment_name: str = NAME,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str | None = None,
        *,
        update_freq: str | int = "epoch",
        step: Unit = "updates",
    ) -> None:
        if tracking_uri is None and save_dir is not None:
            tracking_uri = f"file:{checked_path(save_dir, 'save_dir')}"
        super().__init__(experiment_name, run_name, tracking_uri, update_freq, step=step)
