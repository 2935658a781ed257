"""Loggers for tracking services that are opened, given numbers, and closed in the same way."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable
from importlib import import_module
from typing import Any, ClassVar

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, missing_package
from fitkit.extras.loggers.base import Logger, Unit, pixels
from fitkit.extras.text_files import beside
from fitkit.registry import did_you_mean


class Tracker(Logger):
    """Base class of the loggers for tracking services. Each one says how its package is called.

    To write your own, set `package`, and override `open` and `log_scalars`, and any of `takes`,
    `log_hyperparameters`, `log_figure` and `close`. If a run is open when fit begins, `running`
    returns it. Then it is used and left open.

    Args:
        project: the project's name; None for the package's default.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument that the package takes to open a run.

    Attributes:
        package: the package's name, to import and to install.

    Example:
        >>> import fitkit
        >>> class Logging(fitkit.loggers.Tracker):
        ...     package = "logging"
        ...     def open(self, module, options):
        ...         return module.getLogger(self.project)
        ...     def log_scalars(self, values, step, epoch):
        ...         self.connection.info("%s: %s", step, values)
        >>> logger = Logging("digits")

    Raises:
        MissingPackageError: the package isn't installed.
        ArgumentTypeError: an option that the package doesn't take.
    """

    package: ClassVar[str]

    def __init__(
        self,
        project: str | None = None,
        update_freq: str | int = "epoch",
        *,
        step: Unit = "updates",
        **options: Any,
    ) -> None:
        super().__init__(update_freq, step)
        if project is not None and not isinstance(project, str):
            raise ArgumentTypeError(f"project={describe(project)} must be a string.")
        accepted = sorted(self.takes(self.module()))
        for name in options:
            if name not in accepted:
                raise ArgumentTypeError(
                    f"{type(self).__name__}() has no argument {name!r}."
                    f"{did_you_mean(name, accepted)} It takes project, update_freq, step and what "
                    f"{self.package} takes: {', '.join(accepted)}."
                )
        self.project = project
        self.options = options
        self._owns_run = False

    # ------------------------------------------------------------------ for services to override

    def takes(self, module: Any) -> Iterable[str]:
        """Return the names of the options that open a run."""
        return ()

    def running(self, module: Any) -> Any:
        """Return the run that is open in this process already; None if there is none."""
        return None

    def open(self, module: Any, options: dict[str, Any]) -> Any:
        """Open a run, or the run `self.run_id` again if there is one. Note its id as `run_id`.

        Args:
            module: the package.
            options: the options as given.
        """
        raise NotImplementedError(f"{type(self).__name__} must define open.")

    def close(self, module: Any, error: BaseException | None) -> None:
        """Close the run `self.connection` that `open` has opened; `error` is what ended the fit."""

    # ------------------------------------------------------------------ the moments of a fit

    def module(self) -> Any:
        """Return the package, imported."""
        try:
            return import_module(self.package)
        except ImportError:
            raise missing_package(self.package, self.package, type(self).__name__) from None

    def start(self) -> None:
        module = self.module()
        found = self.running(module)
        self._owns_run = found is None
        self.connection: Any = self.open(module, dict(self.options)) if found is None else found

    def finish(self, error: BaseException | None = None) -> None:
        if self._owns_run:
            self.close(self.module(), error)
        self.connection = None


def arguments_of(function: Any, *without: str) -> list[str]:
    """Return the names of a function's arguments, without those that a logger sets itself."""
    parameters = inspect.signature(function).parameters.values()
    named = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    return [name for name in named if name not in ("self", "project", "project_name", *without)]


class _LogsDicts(Tracker):
    """A tracker whose run takes dicts, with a step beside them."""

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self.connection.config.update(values)

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        self.connection.log(with_epoch(values, epoch), step=step)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        image = self.module().Image(pixels(figure))
        self.opened().log({name: image}, step=self.step if step is None else step)


class Trackio(_LogsDicts):
    """Logs to trackio, Hugging Face's tracker, on this machine. `trackio show` draws the runs.

    The x-axis is the training step; `epoch` counts from 0. A resumed training continues its run,
    which trackio knows by its name.

    Args:
        project: the project's name. Default None: `"fitkit"`.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument of `trackio.init`: `name`, `group`, `space_id`, …

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.Trackio("digits")  # doctest: +SKIP

    Raises:
        MissingPackageError: trackio isn't installed.
        ArgumentTypeError: an option that trackio.init doesn't take.
    """

    package = "trackio"

    def takes(self, module: Any) -> Iterable[str]:
        return arguments_of(module.init, "config", "resume")

    def running(self, module: Any) -> Any:
        return module.context_vars.current_run.get()

    def open(self, module: Any, options: dict[str, Any]) -> Any:
        options = {"embed": False, **options}
        if self.run_id:
            options |= {"name": self.run_id, "resume": "allow"}
        run = module.init(self.project or "fitkit", **options)
        self.run_id: str | None = run.name
        return run

    def close(self, module: Any, error: BaseException | None) -> None:
        module.finish()


class SwanLab(_LogsDicts):
    """Logs to SwanLab. With `mode="offline"` it writes files that `swanlab sync` can send.

    The x-axis is the training step; `epoch` counts from 0. A resumed training continues its run.

    Args:
        project: the project's name. None uses swanlab's default.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument of `swanlab.init`: `name`, `mode`, `log_dir`, `tags`, …

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.SwanLab("digits", mode="offline")  # doctest: +SKIP

    Raises:
        MissingPackageError: swanlab isn't installed.
        ArgumentTypeError: an option that swanlab.init doesn't take.
    """

    package = "swanlab"

    def takes(self, module: Any) -> Iterable[str]:
        return arguments_of(module.init, "config", "id", "resume")

    def running(self, module: Any) -> Any:
        return module.get_run() if module.has_run() else None

    def open(self, module: Any, options: dict[str, Any]) -> Any:
        if self.run_id:
            options |= {"id": self.run_id, "resume": "allow"}
        run = module.init(project=self.project, **options)
        self.run_id: str | None = run.id
        return run

    def close(self, module: Any, error: BaseException | None) -> None:
        ended = "success" if error is None else "crashed"
        if isinstance(error, KeyboardInterrupt):
            ended = "aborted"
        self.connection.finish(ended, None if error is None else repr(error))


class Comet(Tracker):
    """Logs to Comet. With `online=False` it writes archives that `comet upload` can send.

    The x-axis is the training step; each value also has its epoch, from 0. A resumed training
    continues its experiment.

    Args:
        project: the project's name. None uses Comet's default.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument of `comet_ml.start` or of its `ExperimentConfig`: `online`,
            `workspace`, `name`, `tags`, `offline_directory`, …

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.Comet("digits", online=False)  # doctest: +SKIP

    Raises:
        MissingPackageError: comet_ml isn't installed.
        ArgumentTypeError: an option that Comet doesn't take.
    """

    package = "comet_ml"

    def takes(self, module: Any) -> Iterable[str]:
        of_start = arguments_of(module.start, "experiment_key", "mode", "experiment_config")
        return {*of_start, *arguments_of(module.ExperimentConfig)}

    def running(self, module: Any) -> Any:
        found = module.get_running_experiment()
        return None if found is None or found.ended else found

    def open(self, module: Any, options: dict[str, Any]) -> Any:
        names = arguments_of(module.start)
        of_start = {name: value for name, value in options.items() if name in names}
        # Otherwise Comet would look for the net and for command lines by itself.
        quiet = {"auto_param_logging": False, "log_graph": False}
        config = {**quiet, **{n: value for n, value in options.items() if n not in names}}
        if self.run_id:
            of_start |= {"experiment_key": self.run_id, "mode": "get_or_create"}
        run = module.start(
            project_name=self.project,
            experiment_config=module.ExperimentConfig(**config),
            **of_start,
        )
        self.run_id: str | None = run.get_key()
        return run

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self.connection.log_parameters(values)

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        self.connection.log_metrics(values, step=step, epoch=epoch)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        self.opened().log_image(pixels(figure), name=name, step=self.step if step is None else step)

    def close(self, module: Any, error: BaseException | None) -> None:
        if error is not None:
            self.connection.log_other("error", repr(error))
        self.connection.end()


class ClearML(Tracker):
    """Logs to ClearML. After `clearml.Task.set_offline(True)` it writes files on this machine.

    `loss` and `val_loss` are two curves of one plot over the training step. A resumed training
    continues its task. ClearML keeps no NaN and no infinity, so these are left out.

    Args:
        project: the project's name. Default None: `"fitkit"`.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument of `clearml.Task.init`: `task_name`, `tags`, `output_uri`, …

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.ClearML("digits", task_name="first")  # doctest: +SKIP

    Raises:
        MissingPackageError: clearml isn't installed.
        ArgumentTypeError: an option that Task.init doesn't take.
    """

    package = "clearml"

    def takes(self, module: Any) -> Iterable[str]:
        return arguments_of(module.Task.init, "continue_last_task", "reuse_last_task_id")

    def running(self, module: Any) -> Any:
        return module.Task.current_task()

    def open(self, module: Any, options: dict[str, Any]) -> Any:
        # ClearML would patch torch.save and the arguments of your script.
        quiet = {"auto_connect_frameworks": False, "auto_connect_arg_parser": False}
        # 0: without it, ClearML would add the last step to the steps of a task that continues.
        again = {"continue_last_task": 0} if self.run_id else {}
        task = module.Task.init(
            project_name=self.project or "fitkit",
            reuse_last_task_id=self.run_id or False,
            **{"task_name": "fit", **quiet, **options, **again},
        )
        self.run_id: str | None = task.id
        return task

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self.connection.connect(dict(values), name="fitkit")

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        report = self.connection.get_logger().report_scalar
        for name, value in with_epoch(values, epoch).items():
            series = "validation" if name.startswith("val_") else "train"
            if math.isfinite(value):  # ClearML would report 0
                report(name.removeprefix("val_"), series, value, step)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        self.opened().get_logger().report_image(
            name, name, self.step if step is None else step, image=pixels(figure)[..., :3]
        )

    def close(self, module: Any, error: BaseException | None) -> None:
        if error is not None:
            self.connection.mark_failed(status_message=repr(error), force=True)
        self.connection.close()


class Aim(Tracker):
    """Logs to Aim: a folder on this machine, or a server. `aim up` draws the runs.

    The x-axis is the training step; each value also has its epoch, from 0. `loss` and `val_loss`
    are one metric in two contexts, `subset="train"` and `"val"`. A resumed training continues its
    run.

    Args:
        project: the experiment's name. None uses Aim's default.
        update_freq: when to log; see `Logger`.
        step: what the steps count: `"updates"` (default) or `"batches"`; see `Logger`.
        **options: any other argument of `aim.Run`: `repo`, `system_tracking_interval`, …

    Example:
        >>> import fitkit
        >>> logger = fitkit.loggers.Aim("digits", repo="runs")  # doctest: +SKIP

    Raises:
        MissingPackageError: aim isn't installed.
        ArgumentTypeError: an option that aim.Run doesn't take.
    """

    package = "aim"

    def takes(self, module: Any) -> Iterable[str]:
        return arguments_of(module.Run.__init__, "run_hash", "read_only", "experiment")

    def open(self, module: Any, options: dict[str, Any]) -> Any:
        options = {"capture_terminal_logs": False, **options}
        run = module.Run(self.run_id, experiment=self.project, **options)
        self.run_id: str | None = run.hash
        return run

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self.connection["hparams"] = {
            name: value if isinstance(value, (str, numbers.Number)) else str(value)
            for name, value in values.items()
        }

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        for name, value in values.items():
            subset = "val" if name.startswith("val_") else "train"
            self.connection.track(
                value,
                name=name.removeprefix("val_"),
                step=step,
                epoch=epoch,
                context={"subset": subset},
            )

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        image = self.module().Image(pixels(figure))
        self.opened().track(image, name=name, step=self.step if step is None else step)

    def close(self, module: Any, error: BaseException | None) -> None:
        if error is not None:
            self.connection["error"] = repr(error)
        self.connection.close()


def with_epoch(values: dict[str, float], epoch: int | None) -> dict[str, float]:
    """Add the epoch's number to values, if there is one. A value `epoch` becomes `epoch_`."""
    return values if epoch is None else {**beside(["epoch"], values), "epoch": epoch}
