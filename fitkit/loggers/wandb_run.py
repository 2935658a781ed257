"""A run at Weights & Biases."""

from __future__ import annotations

import inspect
from typing import Any

from fitkit.arguments import describe
from fitkit.callbacks.text_files import beside
from fitkit.errors import ArgumentTypeError, missing_package
from fitkit.loggers.base import Logger, pixels
from fitkit.registry import nearest

OURS = ("id", "resume")
"""Arguments of wandb.init that the logger gives itself."""


class WandB(Logger):
    """Logs to Weights & Biases; with `mode="offline"` into files, to be sent by `wandb sync`.

    A value called `step` or `epoch` is `step_` or `epoch_` there.

    A run that is open when fit begins is used and left open. Charts are over `step`, the training
    batches so far; `epoch` counts from 0. A training that is resumed goes on with its run.

    Args:
        project: the project's name; None leaves it to wandb.
        update_freq: when to log; see `Logger`.
        **options: what else `wandb.init` takes: `name`, `mode`, `dir`, `tags`, `group`, …

    Raises:
        MissingPackageError: wandb isn't installed.
        ArgumentTypeError: an option that wandb.init doesn't take.
    """

    def __init__(
        self, project: str | None = None, update_freq: str | int = "epoch", **options: Any
    ) -> None:
        super().__init__(update_freq)
        if project is not None and not isinstance(project, str):
            raise ArgumentTypeError(f"project={describe(project)} must be a string.")
        accepted = [
            name for name in inspect.signature(_wandb().init).parameters if name not in OURS
        ]
        for name in options:
            if name not in accepted:
                close = nearest(name, accepted)
                hint = f" Did you mean {' or '.join(close)}?" if close else ""
                raise ArgumentTypeError(
                    f"WandB() has no argument {name!r}.{hint} It takes update_freq and what "
                    f"wandb.init takes: {', '.join(accepted)}."
                )
        self.project = project
        self.options = options
        self._owns_run = False

    def start(self) -> None:
        wandb = _wandb()
        self._owns_run = wandb.run is None
        self.connection = wandb.run
        if self._owns_run:
            again = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
            self.connection = wandb.init(project=self.project, **self.options, **again)
            # wandb's own count of steps refuses to go back, as a training that is resumed does.
            self.connection.define_metric("*", step_metric="step")
        self.run_id = self.connection.id

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self.connection.config.update(values, allow_val_change=True)

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        place: dict[str, float] = {"step": step}
        if epoch is not None:
            place["epoch"] = epoch
        self.connection.log({**beside(["step", "epoch"], values), **place})

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        shown = self.step if step is None else step
        # As numbers: wandb doesn't know subclasses of Figure, such as history.plot() gives.
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
