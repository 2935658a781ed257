"""One training of many: its seed, its model, its value; and the file with all values."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.run_folder import RunFolder
from fitkit.extras.text_files import as_json
from fitkit.extras.trials.pool import Ask, Job
from fitkit.model import Model
from fitkit.outputs import EMPTY_MEAN
from fitkit.random_states import set_seed
from fitkit.registry import did_you_mean
from fitkit.seams.callbacks import Callback
from fitkit.seams.machines import detect

FILE = "runs.jsonl"
"""What came of each run: a JSON document a line."""

Build = Callable[..., Any]


class SeedByShape(TorchDispatchMode):
    """Within it, each random tensor gets the numbers of its shape, and of how many like it came
    before.

    So nets get the same initial weights where they have the same shapes, whatever other layers one
    of them has. Each net's own way to draw them stays.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._drawn: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            first = args[0] if args else ()
            shape = tuple(
                getattr(first, "shape", first if isinstance(first, (list, tuple)) else ())
            )
            self._drawn[f"{shape}"] += 1
            place = f"{self._seed} {shape} {self._drawn[f'{shape}']}"
            torch.manual_seed(zlib.crc32(place.encode()))
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Training:
    """The work of a run: build a model, train it, and return its value.

    Attributes:
        builders: functions by name.
        arguments: of `fit`.
        metric: the value's name in the history.
        best: `min` or `max`, if the best epoch's value counts; None: the last one's.
        folder: where each run has a folder of its own; None: nowhere.
        reports: whether to ask after each epoch if the run shall end.
    """

    builders: Mapping[str, Build]
    arguments: Mapping[str, Any]
    metric: str
    best: Callable[..., float] | None
    folder: str | None
    reports: bool = False

    def __call__(self, job: Job, ask: Ask) -> dict[str, Any]:
        """Train the job's run.

        Returns:
            Its `value`, or `pruned`, and its `epochs`.

        Raises:
            ConfigurationError: the builder returns something else than a model, or the history has
                no such value.
            FloatingPointError: the value isn't finite.
        """
        seed = job["seed"]
        set_seed(seed)
        with SeedByShape(seed):
            built = self.builders[job["name"]](**job.get("params", {}))
        model, own = built if isinstance(built, tuple) and len(built) == 2 else (built, {})
        if not isinstance(model, Model) or not isinstance(own, Mapping):
            raise ArgumentTypeError(
                f"The function for {job['name']!r} returned {describe(built)}. It must return a "
                "compiled fitkit.Model, or a model and a dict of arguments of fit."
            )
        arguments = {**self.arguments, **own, "verbose": 0}
        given = arguments.pop("callbacks", None) or []
        callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
        reports = _Reports(self.metric, ask) if self.reports else None
        if reports is not None:
            callbacks.append(reports)
        if self.folder is not None:
            kept = RunFolder(Path(self.folder) / job["folder"])
            callbacks.append(kept)
            if kept.resume_path is not None:  # cut in an earlier call
                arguments["resume_from"] = kept.resume_path
        set_seed(seed)  # again: the builders drew other numbers of them
        history = model.fit(**arguments, callbacks=callbacks)
        epochs = len(history.epoch)
        if reports is not None and reports.is_pruned:
            return {"value": None, "pruned": True, "epochs": epochs}
        return {"value": self._value(history.history), "epochs": epochs}

    def _value(self, history: Mapping[str, list[Any]]) -> float:
        if self.metric not in history:
            raise ConfigurationError(
                f"The logs of fit have no {self.metric!r}.{did_you_mean(self.metric, history)} "
                f"They have {', '.join(history)}."
                + (
                    " Give validation_data or validation_split."
                    if self.metric.removeprefix("val_") in history
                    else ""
                )
            )
        values = [as_json(value) for value in history[self.metric] if value is not EMPTY_MEAN]
        finite = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
        if not finite or (self.best is None and finite[-1] is not values[-1]):
            raise FloatingPointError(f"{self.metric} isn't a finite number: {values[-1:]}.")
        return float(finite[-1] if self.best is None else self.best(finite))


class _Reports(Callback):
    """Tells each epoch's value, and ends the run if the answer says so."""

    def __init__(self, metric: str, ask: Ask) -> None:
        self.metric = metric
        self.is_pruned = False
        self._ask = ask

    def _state_for_ranks(self, strategy: object) -> dict[str, Any]:
        return {**super()._state_for_ranks(strategy), "_ask": None}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        value = as_json(logs.get(self.metric))
        if (
            self._ask is None
            or not isinstance(value, (int, float))
            or not self.model.is_global_zero
        ):
            return
        if self._ask({"epoch": epoch, "value": value}):
            self.is_pruned = True
            self.model.stop_training = True


def check_alone(verb: str) -> None:
    """Refuse to start runs in each of several ranks.

    Raises:
        ConfigurationError: a launcher has started this process as one of several.
    """
    cluster = detect()
    if cluster is not None and cluster.world_size > 1:
        raise ConfigurationError(
            f"{verb} starts its runs itself, and this is one of {cluster.world_size} processes of "
            f"{cluster.launcher}. Start the script without it: each run can have several devices."
        )


class Notes:
    """The file that says what came of each run, so that a later call goes on from it.

    Args:
        folder: where it is; None keeps nothing.
        about: what all runs have in common. A file of other runs is refused.

    Attributes:
        known: what earlier calls have written, in its order.

    Raises:
        ConfigurationError: the file is of other runs, another program writes it, or it isn't one.
    """

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.known: list[dict[str, Any]] = []
        self._file: Any = None
        self._ends = contextlib.ExitStack()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        with contextlib.ExitStack() as ends:
            file = ends.enter_context(path.open("a+", encoding="utf-8"))
            with contextlib.suppress(ImportError):  # Windows
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigurationError(
                        f"Another program writes {path} now. Wait for its end, or choose another "
                        "folder."
                    ) from None
                except OSError:
                    pass  # a file system without locks
            self._read(file, path, about)
            self._file = file
            self._ends = ends.pop_all()
        if not self.known and path.stat().st_size == 0:
            self._write(about)

    def _read(self, file: Any, path: Path, about: dict[str, Any]) -> None:
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was cut
            file.truncate(len(whole.encode()))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            assert all(isinstance(line, dict) for line in lines)
        except (ValueError, AssertionError):
            raise ConfigurationError(
                f"{path} isn't a file of runs. Choose another folder."
            ) from None
        if not lines:
            return
        first, *self.known = lines
        for name in {**first, **about}:
            if first.get(name) != as_json(about.get(name)):
                raise ConfigurationError(
                    f"{path} has runs with {name}={first.get(name)!r}, and now {name}="
                    f"{about.get(name)!r}. Choose another folder for other runs."
                )

    def add(self, record: dict[str, Any]) -> None:
        """Write down what came of a run. It is on the disk when this returns."""
        if self._file is not None:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(as_json(record)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()
