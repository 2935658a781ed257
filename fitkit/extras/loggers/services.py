"""Loggers for tracking services: Weights & Biases, and MLflow."""

from __future__ import annotations

import inspect
import re
import time
from itertools import islice
from typing import Any

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, missing_package
from fitkit.extras.loggers.base import Logger, Unit, pixels
from fitkit.extras.text_files import beside
from fitkit.registry import did_you_mean

OURS = ("id", "resume")
"""Arguments of wandb.init that the logger sets itself."""


class WandB(Logger):
    """Logs to Weights & Biases. With `mode="offline"` it writes files that `wandb sync` can send.

    If a run is open when fit begins, it is used and left open. The x-axis is `step`, the number of
    training batches so far; `epoch` counts from 0. A resumed training continues its run. Values
    named `step` or `epoch` become `step_` or `epoch_`.

    Args:
        project: the project's name. None uses wandb's default.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"batches"` (default) or `"updates"`; see `Logger`.
        **options: any other argument of `wandb.init`: `name`, `mode`, `dir`, `tags`, `group`, …

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.WandB(project="digits")

    Raises:
        MissingPackageError: wandb isn't installed.
        ArgumentTypeError: an option that wandb.init doesn't take.
    """

    def __init__(
        self,
        project: str | None = None,
        update_freq: str | int = "epoch",
        *,
        step: Unit = "batches",
        **options: Any,
    ) -> None:
        super().__init__(update_freq, step)
        if project is not None and not isinstance(project, str):
            raise ArgumentTypeError(f"project={describe(project)} must be a string.")
        accepted = [
            name for name in inspect.signature(_wandb().init).parameters if name not in OURS
        ]
        for name in options:
            if name not in accepted:
                raise ArgumentTypeError(
                    f"WandB() has no argument {name!r}.{did_you_mean(name, accepted)} It takes "
                    f"update_freq and what wandb.init takes: {', '.join(accepted)}."
                )
        self.project = project
        self.options = options
        self._owns_run = False

    def start(self) -> None:
        wandb = _wandb()
        self._owns_run = wandb.run is None
        self.connection: Any = wandb.run
        if self._owns_run:
            again = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
            self.connection = wandb.init(project=self.project, **self.options, **again)
            # wandb's own step counter refuses to go back, as a resumed training must.
            self.connection.define_metric("*", step_metric="step")
        self.run_id: str | None = self.connection.id

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self.connection.config.update(values, allow_val_change=True)

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        place: dict[str, float] = {"step": step}
        if epoch is not None:
            place["epoch"] = epoch
        self.connection.log({**beside(["step", "epoch"], values), **place})

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        shown = self.step if step is None else step
        # As pixels: wandb doesn't know subclasses of Figure, such as history.plot() returns.
        self.opened().log({name: _wandb().Image(pixels(figure)), "step": shown})

    def finish(self, error: BaseException | None = None) -> None:
        connection, self.connection = self.connection, None
        if self._owns_run:
            connection.finish(exit_code=0 if error is None else 1)


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise missing_package("wandb", "wandb", "WandB") from None
    return wandb


MOST_METRICS, MOST_PARAMS = 1000, 100
"""The most metrics that MLflow's servers take at once."""


class MLflow(Logger):
    """Logs to MLflow: a database, a server or a folder.

    If your own run is open when fit begins (`mlflow.start_run()`), and you give neither an
    experiment nor an address, that run is used and left open. The x-axis is the training step. A
    resumed training continues its run. A value named `epoch` becomes `epoch_`. Characters in names
    that MLflow doesn't accept become `_`.

    Args:
        experiment: the experiment's name, created if needed. None: MLflow's default.
        run_name: the run's name. None lets MLflow choose one.
        tracking_uri: where to log, such as `"sqlite:///runs.db"` or `"http://…"`. None: MLflow's
            own setting (`MLFLOW_TRACKING_URI`). For a folder, such as `"file:runs"`, MLflow 3
            requires MLFLOW_ALLOW_FILE_STORE=true.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"batches"` (default) or `"updates"`; see `Logger`.

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.MLflow("digits")

    Raises:
        MissingPackageError: mlflow isn't installed.
        ArgumentTypeError: an argument is invalid.
    """

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        update_freq: str | int = "epoch",
        *,
        step: Unit = "batches",
    ) -> None:
        super().__init__(update_freq, step)
        given = {"experiment": experiment, "run_name": run_name, "tracking_uri": tracking_uri}
        for name, value in given.items():
            if value is not None and (not isinstance(value, str) or not value):
                raise ArgumentTypeError(f"{name}={describe(value)} must be a string or None.")
        self.experiment = experiment
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self._owns_run = False
        _mlflow()

    def start(self) -> None:
        mlflow = _mlflow()
        self.connection: Any = mlflow.MlflowClient(self.tracking_uri)
        active = None
        if self.experiment is None and self.tracking_uri is None:
            active = mlflow.active_run()
        self._owns_run = active is None
        if active is not None:
            self.run_id = active.info.run_id
        elif self.run_id is None:
            run = self.connection.create_run(self._experiment_id(), run_name=self.run_name)
            self.run_id = run.info.run_id
        else:
            self.connection.update_run(self.run_id, status="RUNNING")

    def _experiment_id(self) -> str:
        if self.experiment is None:
            return "0"  # MLflow's "Default" experiment
        found = self.connection.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self.connection.create_experiment(self.experiment))

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        # MLflow refuses to change a run's settings, such as more epochs in a resumed training.
        had = self.connection.get_run(self.run_id).data.params
        new = iter([Param(_key(k), str(v)) for k, v in values.items() if _key(k) not in had])
        while some := list(islice(new, MOST_PARAMS)):
            self.connection.log_batch(self.run_id, params=some)

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        from mlflow.entities import Metric

        if epoch is not None:
            values = {**beside(["epoch"], values), "epoch": epoch}
        now_ms = int(time.time() * 1000)
        metrics = iter([Metric(_key(k), v, now_ms, step) for k, v in values.items()])
        while some := list(islice(metrics, MOST_METRICS)):
            self.connection.log_batch(self.run_id, metrics=some)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        shown = self.step if step is None else step
        self.opened().log_figure(self.run_id, figure, f"{_key(name)}_{shown}.png")

    def finish(self, error: BaseException | None = None) -> None:
        connection, self.connection = self.connection, None
        if self._owns_run:
            stopped = isinstance(error, KeyboardInterrupt)
            status = "FINISHED" if error is None else "KILLED" if stopped else "FAILED"
            connection.set_terminated(self.run_id, status)


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError:
        raise missing_package("mlflow", "mlflow", "MLflow") from None
    return mlflow
