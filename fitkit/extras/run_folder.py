"""A folder that holds a run: its settings, values, curves and weights, and a page that shows it."""

from __future__ import annotations

import base64
import datetime
import html
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fitkit.callbacks import CallbackList, ModelCheckpoint
from fitkit.errors import ConfigurationError
from fitkit.extras.loggers.base import hyperparameters_of
from fitkit.extras.loggers.text import CSV
from fitkit.outputs import EMPTY_MEAN
from fitkit.seams import Callback, Logs, Module, as_json, checked_path, replace_text, replacing
from fitkit.version import __version__

RECORD, PAGE, CURVES, RESUME = "run.json", "index.html", "curves.png", "resume.h5"
"""The names of a run's files."""

REDRAWN_AFTER_S = 30
"""The fewest seconds between two drawings of the curves within a fit."""

PACKAGES = ("torch", "numpy", "torchmetrics", "h5py")
"""The packages whose releases a run notes."""


class RunFolder(CallbackList):
    """Keeps a run in a folder: what was asked for, what came out, and how to continue.

    The folder gets

    - `run.json`: the settings of `compile` and `fit`, the environment, how the run ended;
    - `log.csv`: the values of each epoch, and `curves.png`, if matplotlib is installed;
    - `best.safetensors` and `last.safetensors`: weights;
    - `resume.h5`: the newest epoch's checkpoint;
    - `index.html`: all of it on one page, which opens in a browser.

    `fit(resume_from=runs.resume_path, callbacks=runs)` continues a run in its folder. Any other
    training is refused there. `python -m fitkit diff runs/a runs/b` says in what two runs differ.

    Args:
        folder: the folder; it is created. `%n` stands for the first number that isn't used yet.
            Other placeholders, such as `%Y-%m-%d` and `%H%M%S`, are those of `time.strftime`.
        monitor: the log that decides which weights are best. Default None: `"val_loss"`, or
            `"loss"` without a validation.
        mode: `"min"`, `"max"` or `"auto"` (default), which infers it from the name.

    Attributes:
        path: the folder.
        resume_path: the file that `fit(resume_from=…)` continues from.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("adam", "mse")
        >>> runs = fitkit.callbacks.RunFolder("runs/%n")
        >>> x, y = torch.ones(32, 2), torch.ones(32, 1)
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=runs)
        >>> runs.path.as_posix(), sorted(file.name for file in runs.path.glob("*.safetensors"))
        ('runs/1', ['best.safetensors', 'last.safetensors'])

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid. When fit begins: the folder
            holds another run.
    """

    def __init__(
        self, folder: str | os.PathLike[str], monitor: str | None = None, mode: str = "auto"
    ) -> None:
        self.path: Path = _filled_in(checked_path(folder, "folder"))
        self.resume_path: Path = self.path / RESUME
        super().__init__(
            [
                _Record(self.path),
                CSV(self.path / "log.csv"),
                _BestWeights(self.path / "best.safetensors", monitor, mode),
                ModelCheckpoint(self.path / "last.safetensors", save_weights_only=True),
                ModelCheckpoint(self.resume_path),
            ]
        )


def _filled_in(folder: Path) -> Path:
    """Return a folder's path with its placeholders filled in."""
    text = str(folder)
    if "%" not in text:
        return folder
    text = time.strftime(text.replace("%n", "%%n"))
    while "%n" in text:
        before, after = text.split("%n", 1)
        above, begins = os.path.split(before)
        ends = after.partition(os.sep)[0].partition("%n")[0]
        pattern = re.compile(rf"{re.escape(begins)}(\d+){re.escape(ends)}")
        there = os.listdir(above or ".") if os.path.isdir(above or ".") else []
        used = [int(match[1]) for match in map(pattern.fullmatch, there) if match]
        text = f"{before}{max(used, default=0) + 1}{after}"
    return Path(text)


class _BestWeights(ModelCheckpoint):
    """The best weights, by a validation's loss or, without a validation, the training's."""

    def __init__(self, path: Path, monitor: str | None, mode: str) -> None:
        self._arguments: dict[str, Any] = {
            "filepath": path,
            "mode": mode,
            "save_best_only": True,
            "save_weights_only": True,
        }
        self._chooses = monitor is None
        super().__init__(monitor=monitor, **self._arguments)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._chooses:
            monitor = "val_loss" if self.params["validation"] else "loss"
            if monitor != self.monitor:
                super().__init__(monitor=monitor, **self._arguments)
        super().on_train_begin(logs)


class _Record(Callback):
    """Claims the folder for one run, and keeps its record, curves and page."""

    stops_alike = True
    comes_last = True  # to note what all other callbacks add to an epoch's logs

    def __init__(self, path: Path) -> None:
        self.path = path
        self._resumed: str | None = None  # the id of the run that a checkpoint belongs to
        self._record: dict[str, Any] = {}
        self._epochs: list[dict[str, Any]] = []
        self._drawn_at = 0.0

    # ------------------------------------------------------------------ the moments of a fit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._resumed, self._record, self._epochs, self._drawn_at = None, {}, [], 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        # Not when fit begins: only a checkpoint says which run this is, and it is loaded by now.
        if self.model.is_global_zero and not self._record:
            self.add_cleanup(self._close)
            self._claim()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        plain = {name: as_json(None if v is EMPTY_MEAN else v) for name, v in logs.items()}
        self._epochs = [one for one in self._epochs if one["epoch"] < epoch]
        self._epochs.append({"epoch": epoch, **plain})
        if self.model.is_global_zero:
            self._write()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._record["status"] = "finished"

    def on_exception(self, error: BaseException) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        self._record["status"] = "interrupted" if stopped else "failed"
        self._record["error"] = "" if stopped else f"{type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._record.get("id", ""), "epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = str(state["run"]) or None
        self._epochs = [dict(one) for one in state["epochs"]]

    # ------------------------------------------------------------------ the files

    def _claim(self) -> None:
        """Take the folder for this run.

        Raises:
            ConfigurationError: it holds another one.
        """
        place = self.path / RECORD
        self.path.mkdir(parents=True, exist_ok=True)
        record = {
            "id": uuid.uuid4().hex,
            "continues": self._resumed or "",
            "begun": _now(),
            "status": "running",
            "error": "",
            "settings": as_json(hyperparameters_of(self.model, self.params)),
            "environment": environment(self.model),
        }
        try:
            with open(place, "x", encoding="utf-8") as file:
                json.dump(record, file)
        except FileExistsError:
            found = read_record(self.path)
            if found is None or found.get("id") != self._resumed:
                begun = "" if found is None else f" of {found.get('begun', '')}"
                raise ConfigurationError(
                    f"{self.path} holds a run{begun} already. Continue it with "
                    f"fit(resume_from={str(self.path / RESUME)!r}), or choose another folder: "
                    f"RunFolder({str(self.path.parent / '%n')!r}) takes the next free number."
                ) from None
            record |= {name: found.get(name, "") for name in ("id", "begun", "continues")}
        self._record = record
        self._write()

    def _close(self) -> None:
        if not self._record.get("id"):
            return  # refused
        if self._record["status"] == "running":  # stopped before the first hook of its end
            self._record["status"] = "failed"
        self._record["ended"] = _now()
        self._drawn_at = 0.0
        self._write()

    def _write(self) -> None:
        """Write the record, the page, and at times the curves."""
        record = {**self._record, "epochs": self._epochs}
        replace_text(self.path / RECORD, json.dumps(record, indent=2) + "\n")
        if self._epochs and time.monotonic() - self._drawn_at > REDRAWN_AFTER_S:
            self._draw()
            self._drawn_at = time.monotonic()
        replace_text(self.path / PAGE, page(self.path, record))

    def _draw(self) -> None:
        if find_spec("matplotlib") is None:
            return
        from fitkit.extras.pictures.curves import Curve, curve_values, learning_curves

        names = dict.fromkeys(name for one in self._epochs for name in one if name != "epoch")
        curves = {}
        for name in names:
            found = [(one["epoch"] + 1, one[name]) for one in self._epochs if name in one]
            # JSON has no NaN: None stands for it.
            values = curve_values([math.nan if v is None else v for _, v in found])
            if values is not None:
                curves[name] = Curve([epoch for epoch, _ in found], values)
        if curves:
            picture = io.BytesIO()
            learning_curves(curves).savefig(picture, format="png", dpi=110)
            content = picture.getvalue()
            with replacing(self.path / CURVES, len(content)) as file:
                file.write(content)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return a run folder's record; None if the folder has none that can be read."""
    try:
        found = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def environment(model: Module) -> dict[str, str]:
    """Return what a run's numbers may depend on besides its settings."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.node(),
        "fitkit": __version__,
        **{name: _version(name) for name in PACKAGES},
        "devices": str(model.device) if model.world_size == 1 else f"{model.world_size} ranks",
        "command": " ".join(sys.argv),
        "commit": _commit(),
    }


def _version(package: str) -> str:
    if package == "torch":
        return str(torch.__version__)  # with its build
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the working folder, with "+" if files differ from it; "" without one."""
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout.strip() if shown.returncode == 0 else ""


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
div { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #ddd;
  overflow-wrap: anywhere } img { max-width: 100% }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 }
  th, td { border-color: #444 } img { background: #fff } }
"""


def page(folder: Path, record: dict[str, Any]) -> str:
    """Return a run on one page of HTML, which needs no other file.

    Args:
        folder: the run's folder.
        record: what `run.json` holds.
    """
    epochs = record["epochs"]
    names = list(dict.fromkeys(name for one in epochs for name in one))
    rows = [[_words(one.get(name)) for name in names] for one in epochs]
    state = {
        "status": f"{record['status']} {record['error']}".strip(),
        "begun": record["begun"],
        "ended": record.get("ended", ""),
        "epochs": len(epochs),
        "continues": record["continues"],
    }
    parts = [_pairs(state)]
    if (folder / CURVES).is_file():
        picture = base64.b64encode((folder / CURVES).read_bytes()).decode()
        parts.append(f'<img alt="Curves of the values" src="data:image/png;base64,{picture}">')
    parts += ["<h2>Values</h2>", _table(names, rows)] if rows else []
    parts += ["<h2>Settings</h2>", _pairs(record["settings"])]
    parts += ["<h2>Environment</h2>", _pairs(record["environment"])]
    title = html.escape(f"Run {folder.name}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _pairs(values: dict[str, Any]) -> str:
    rows = [[name, _words(value)] for name, value in values.items() if value not in ("", None)]
    return _table([], rows)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(one)}</th>" for one in heads) + "</tr>"]
    lines = lines if heads else []
    lines += [
        "<tr>" + "".join(f"<td>{html.escape(one)}</td>" for one in row) + "</tr>" for row in rows
    ]
    return "<div><table>" + "".join(lines) + "</table></div>"


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
