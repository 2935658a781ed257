"""A folder that holds a run: its settings, values, curves and weights, and a page that shows it."""

from __future__ import annotations

import base64
import contextlib
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

from fitkit.errors import ConfigurationError
from fitkit.extras.loggers.base import hyperparameters_of
from fitkit.extras.loggers.text import CSV
from fitkit.extras.run_steps import RunSteps, read_steps
from fitkit.extras.text_files import as_json, checked_path, replace_text
from fitkit.outputs import EMPTY_MEAN
from fitkit.seams.callbacks import (
    Callback,
    CheckpointWriter,
    Logs,
    Monitor,
    from_all_ranks,
    from_rank_zero,
    run_of,
)
from fitkit.seams.files import replacing
from fitkit.seams.networks import Module
from fitkit.seams.strategies import together
from fitkit.typing import Mode
from fitkit.version import __version__

RECORD, PAGE, CURVES, RESUME = "run.json", "index.html", "curves.png", "resume.h5"
BEST, LAST = "best.safetensors", "last.safetensors"
"""The names of a run's files."""

REDRAWN_AFTER_S = 30
"""The fewest seconds between two drawings of the curves within a fit."""

PACKAGES = ("torch", "numpy", "torchmetrics", "h5py")
"""The packages whose releases a run notes."""


class RunFolder(Callback):
    """Keeps a run in a folder: what was asked for, what came out, and how to continue.

    The folder gets

    - `run.json`: the settings of `compile` and `fit`, the environment, how the run ended, and the
      batches that `out_of_memory="split"` has computed in parts;
    - `steps.npy`: the loss, the rate and a digest of the samples of each update, and a digest of
      the weights of each epoch;
    - `log.csv`: the values of each epoch, and `curves.png`, if matplotlib is installed;
    - `best.safetensors`: the weights of the best epoch;
    - `last.safetensors`: those of the newest epoch as a validation sees them, and then those that
      `fit` leaves;
    - `resume.h5`: the newest epoch's checkpoint;
    - `index.html`: all of it on one page, which opens in a browser.

    `fit(resume_from=runs.resume_path, callbacks=runs)` continues a run in its folder. Any other
    training is refused there, unless the run was cut in its first epoch: then it begins again.
    `python -m fitkit diff runs/a runs/b` says in what two runs differ.

    Args:
        folder: the folder; it is created when `fit` begins. `%n` stands for the first number that
            isn't used yet, which no other run gets. Other placeholders, such as `%Y-%m-%d` and
            `%H%M%S`, are those of `time.strftime`. Each new training fills them in anew.
        monitor: the log that decides which weights are best. Default None: `"val_loss"`, with
            several validation sets the first one's. Without any of these: `"loss"`.
        mode: `"min"`, `"max"` or `"auto"` (default), which infers it from the name.

    Attributes:
        path: the folder. A name with placeholders is known once `fit` has begun.
        resume_path: the file that `fit(resume_from=…)` continues from; None while there is none.

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
            holds another run. At the end of the first epoch that should have it: the logs don't
            have the `monitor`.
    """

    stops_alike = True
    each_batch = True  # each update has a row of its own
    comes_last = True  # to note what all other callbacks add to an epoch's logs

    def __init__(
        self, folder: str | os.PathLike[str], monitor: str | None = None, mode: Mode = "auto"
    ) -> None:
        self._template = str(checked_path(folder, "folder"))
        self._path: Path | None = None if "%" in self._template else Path(self._template)
        Monitor("val_loss" if monitor is None else monitor, mode)  # refuses what it can't be
        self._monitor, self._mode = monitor, mode
        self._weights = CheckpointWriter(weights_only=True)
        self._whole = CheckpointWriter()
        self._reset()

    def _reset(self) -> None:
        """Begin a training."""
        self._resumed = ""  # the id of the run that a checkpoint belongs to
        self._record: dict[str, Any] = {}
        self._epochs: list[dict[str, Any]] = []
        self._drawn_at = 0.0
        self._monitored = None if self._monitor is None else Monitor(self._monitor, self._mode)
        self._best: float | None = None
        self._best_by = ""  # the name of the value
        self._log: CSV | None = None
        self._log_state: dict[str, Any] = {}
        self._steps = RunSteps()

    @property
    def path(self) -> Path:
        """The run's folder."""
        if self._path is None:
            raise ConfigurationError(
                f"RunFolder({self._template!r}) gets its name when fit begins. Read path after "
                "that, or write a name without placeholders."
            )
        return self._path

    @property
    def resume_path(self) -> Path | None:
        """The checkpoint to continue from; None while there is none."""
        path = None if self._path is None else self._path / RESUME
        return path if path is not None and path.is_file() else None

    def last_path(self) -> str | None:
        """Return the same, for `fit(resume_from="last")`."""
        return None if self.resume_path is None else str(self.resume_path)

    # ------------------------------------------------------------------ the moments of a fit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()
        if self._monitored is not None:
            self._monitored.begin(self)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        # Not when fit begins: only a checkpoint says which run this is, and it is loaded by now.
        if self._log is None:
            self._open()
            assert self._log is not None
        self._log.on_epoch_begin(epoch)

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        self._choose_monitor(logs)
        if self._monitored is not None:
            self._keep_best(self._monitored.read_within(self, logs))

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._steps.add(self.model, batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._steps.end_epoch(self.model, epoch)
        plain = {name: as_json(None if v is EMPTY_MEAN else v) for name, v in logs.items()}
        self._epochs = [one for one in self._epochs if one["epoch"] < epoch]
        self._epochs.append({"epoch": epoch, **plain})
        assert self._log is not None
        self._log.on_epoch_end(epoch, logs)
        self._choose_monitor(logs)
        if self.model.is_global_zero:
            self._write()
            self._steps.write(self.path)
        if self._monitored is not None:
            self._keep_best(self._monitored.read(self, logs))
        run = run_of(self.model)
        assert run is not None
        with run.as_validated():
            self._weights.save(self.model, str(self.path / LAST))
        self._whole.save(self.model, str(self.path / RESUME))

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._log is not None:  # else no epoch was left to train
            self._weights.save(self.model, str(self.path / LAST))  # as all callbacks left it
        self._record["status"] = "finished"

    def on_exception(self, error: BaseException) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        self._record["status"] = "interrupted" if stopped else "failed"
        self._record["error"] = "" if stopped else f"{type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "run": self._record.get("id", self._resumed),
            "epochs": self._epochs,
            "best": self._best,
            "best_by": self._best_by,
            "log": self._log_state if self._log is None else self._log.state_dict(),
            "steps": from_all_ranks(self.model, self._steps.state()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = str(state["run"])
        self._epochs = [dict(one) for one in state["epochs"]]
        self._best = None if state["best"] is None else float(state["best"])
        self._best_by = str(state["best_by"])
        self._log_state = state["log"]
        steps, rank = state.get("steps", []), self.model.global_rank
        if rank < len(steps):
            self._steps.restore(steps[rank])

    # ------------------------------------------------------------------ the best weights

    def _choose_monitor(self, logs: Logs) -> None:
        """Choose what decides, if the user didn't: by the first logs that have a value for it."""
        if self._monitored is not None:
            return
        names = [*logs]
        if self.params.get("validation"):
            sets = self.params.get("validation_sets") or []
            wanted = ["val_loss", *(f"val_{one}_loss" for one in sets)]
            # Not each epoch need end with a validation, which may have values but no loss.
            wanted += ["loss"] if any(name.startswith("val_") for name in names) else []
        else:
            wanted = ["loss"]
        found = [name for name in wanted if name in names]
        if found:
            self._monitored = Monitor(found[0], self._mode)

    def _keep_best(self, value: float | None) -> None:
        """Save the weights that a value belongs to, if it is the best so far.

        Ranks:
            Collective.
        """
        monitored = self._monitored
        assert monitored is not None
        if monitored.name != self._best_by:
            self._best, self._best_by = None, monitored.name
        before = self._best
        if value is None:
            return
        if before is not None and not math.isnan(before) and not monitored.better(value, before):
            return
        self._best = value
        with monitored.weights(self):
            self._weights.save(self.model, str(self.path / BEST))

    # ------------------------------------------------------------------ the files

    def _open(self) -> None:
        """Find this run's folder, and open its files.

        Ranks:
            Collective: rank 0 finds the folder.

        Raises:
            ConfigurationError: on all ranks, if it holds another run.
        """
        leads = self.model.is_global_zero
        collectives = self.model._fitkit.compilation.strategy.collectives
        together(collectives, self._claim if leads else lambda: None)
        self.add_cleanup(self._close)
        path, has_best = str(self._path), leads and (self.path / BEST).exists()
        path, has_best = from_rank_zero(self.model, (path, has_best))
        self._path = Path(path)
        self._best = self._best if has_best else None
        self._log = CSV(self.path / "log.csv")
        self._log.set_model(self.model)
        self._log.set_params(self.params)
        self._log.on_train_begin()
        if self._log_state:
            self._log.load_state_dict(self._log_state)
            before = read_steps(self.path)
            self._steps.rows = self._steps.rows if before is None else before

    def _claim(self) -> None:
        """Take a folder for this run.

        Raises:
            ConfigurationError: it holds another one.
        """
        record = {
            "id": uuid.uuid4().hex,
            "continues": self._resumed,
            "begun": _now(),
            "status": "running",
            "error": "",
            "settings": as_json(hyperparameters_of(self.model, self.params)),
            "environment": environment(self.model),
        }
        path = self._path
        known = None if path is None or not self._resumed else read_record(path)
        if path is None or ("%" in self._template and (known or {}).get("id") != self._resumed):
            path = made_folder(self._template)
        path.mkdir(parents=True, exist_ok=True)
        is_free = self._hold(path)
        place, text = path / RECORD, json.dumps(record)
        try:
            with open(place, "x", encoding="utf-8") as file:
                try:
                    file.write(text)
                    file.flush()
                except BaseException:
                    place.unlink()  # the disk is full: the folder stays free
                    raise
        except FileExistsError:
            found = read_record(path)
            if found is None or found.get("id") != self._resumed or is_free is False:
                if not _was_cut(path, found, is_free=is_free):
                    raise _held(path, found, is_free=is_free) from None
                for name in (BEST, LAST, CURVES):
                    (path / name).unlink(missing_ok=True)
            else:
                record |= {name: found.get(name, "") for name in ("id", "begun", "continues")}
        self._path, self._record = path, record
        self._write()

    def _hold(self, path: Path) -> bool | None:
        """Hold a folder until this run ends, or its process dies.

        Returns:
            Whether no other run holds it; None where the system can't tell.
        """
        with contextlib.suppress(ImportError, OSError):  # Windows, and some network file systems
            import fcntl

            folder = os.open(path, os.O_RDONLY)
            self.add_cleanup(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True
        return None

    def _close(self) -> None:
        self._log = None
        if not self._record.get("id"):
            return  # refused, or not rank 0
        if self._record["status"] == "running":  # stopped before the first hook of its end
            self._record["status"] = "failed"
        self._record["ended"] = _now()
        self._drawn_at = 0.0
        self._write()

    def _write(self) -> None:
        """Write the record, the page, and at times the curves."""
        monitor = "" if self._monitored is None else self._monitored.name
        parts = self.params.get("parts", {})
        record = {**self._record, "monitor": monitor, "epochs": self._epochs, "parts": parts}
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


def made_folder(template: str) -> Path:
    """Fill in a folder's name, and make the folder. No other caller gets the same `%n`."""
    made = Path()
    for part in Path(time.strftime(template.replace("%n", "%%n"))).parts:
        made = _next_numbered(made, part) if "%n" in part else made / part
    return made


def _next_numbered(above: Path, name: str) -> Path:
    above.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(re.escape(name).replace("%n", r"(\d+)", 1).replace("%n", r"\1"))
    matches = map(pattern.fullmatch, os.listdir(above))
    number = max((int(match[1]) for match in matches if match), default=0)
    while True:
        number += 1
        made = above / name.replace("%n", str(number))
        with contextlib.suppress(FileExistsError):  # another run was faster
            made.mkdir()
            return made


def _was_cut(path: Path, found: dict[str, Any] | None, *, is_free: bool | None) -> bool:
    """Whether a folder's run ended in its first epoch, so that nothing of it can be continued."""
    if found is None or is_free is False or (path / RESUME).exists():
        return False
    ended = ("failed", "interrupted") if is_free is None else ("failed", "interrupted", "running")
    return found.get("status") in ended and len(_epochs_in(found)) <= 1


def _epochs_in(record: dict[str, Any]) -> list[Any]:
    epochs = record.get("epochs", [])
    return epochs if isinstance(epochs, list) else []


def _held(path: Path, found: dict[str, Any] | None, *, is_free: bool | None) -> ConfigurationError:
    """Return the error for a folder that holds another run."""
    begun = "" if found is None else f" of {found.get('begun', '')}"
    other = "choose another folder: RunFolder({!r}) takes the next free number."
    other = other.format(str(path.parent / "%n"))
    if is_free is False:
        return ConfigurationError(
            f"{path} holds a run{begun}, which is going on. Wait for its end, or {other}"
        )
    if not (path / RESUME).exists():
        return ConfigurationError(
            f"{path} holds a run{begun} already, without its {RESUME}, so it can't be continued. "
            f"Delete the folder, or {other}"
        )
    return ConfigurationError(
        f"{path} holds a run{begun} already. Continue it with fit(resume_from="
        f"{str(path / RESUME)!r}, callbacks=RunFolder({str(path)!r})), or {other}"
    )


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


CUT = (
    "They were computed in parts, with the numbers of the whole batch. A smaller batch_size with "
    "more accumulate_grad_batches makes the same updates without the failed attempts."
)


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
        "best by": record.get("monitor", ""),
        "continues": record["continues"],
    }
    parts = [_pairs(state)]
    if (folder / CURVES).is_file():
        picture = base64.b64encode((folder / CURVES).read_bytes()).decode()
        parts.append(f'<img alt="Curves of the values" src="data:image/png;base64,{picture}">')
    parts += ["<h2>Values</h2>", _table(names, rows)] if rows else []
    if cut := record.get("parts"):
        parts += ["<h2>Batches that didn't fit into memory</h2>", f"<p>{html.escape(CUT)}</p>"]
        parts.append(_table(["batch", "parts"], [[one, str(cut[one])] for one in cut]))
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
