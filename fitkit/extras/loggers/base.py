"""The base class of loggers, which decides what is logged when, and on which rank."""

from __future__ import annotations

import numbers
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fitkit.arguments import check_count, describe, plain_settings
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.rate_callbacks import optimizers_of, rate_of
from fitkit.extras.text_files import plain_value, writable
from fitkit.extras.watches import BatchLosses
from fitkit.outputs import EMPTY_MEAN
from fitkit.seams.callbacks import Callback, Logs, run_of
from fitkit.seams.networks import Module

Unit = Literal["batches", "updates"]

READ_EVERY = 100
"""The most batches whose losses stay on the device until one read fetches them all."""


class Moment(NamedTuple):
    """Batches of an epoch that are logged together.

    Attributes:
        first, last: the first and the last one's number in the epoch.
        step: the step after the last.
        rate: the learning rate of the last.
    """

    first: int
    last: int
    step: int
    rate: float


class Logger(Callback):
    """Base class of loggers, which record a training's numbers. A logger is a callback of `fit`.

    To write your own, override `log_scalars` and any of the other methods. They are called on rank
    0 only, in this order: `start`, `log_hyperparameters`, `log_scalars` for each epoch (and within
    epochs, by `update_freq`), `finish`.

    Args:
        update_freq: `"epoch"` (default) logs at the end of each epoch. A number n also logs at
            every n-th batch: `batch_loss` (the mean loss of the n batches on rank 0),
            `batch_learning_rate`, and the running values of the progress bar. These are the metrics
            so far and the values of `self.log`. This computes all metrics and reads the device.
            With n = 1 it does so at each step, and a small net may take several times as long.
            `"batch"` logs each batch's loss and rate only, and reads the device every 100 batches.
        step: what the steps count, and a number n of `update_freq`. `"batches"` (default) counts
            training batches, from 0 at each new training. `"updates"` counts the updates of
            `model.global_step`, as Lightning and transformers do: with accumulation several batches
            make one, each of several optimizers counts, and a further `fit` continues the count.

    Attributes:
        counts_updates: whether the steps count updates.
        resumes: whether the training continues with a later epoch than the first.
        run_id: the id of the run at the logger's service, if there is one. Checkpoints keep it, so
            that a resumed training continues its run.
        connection: what a logger keeps open during a fit. It isn't sent to other ranks.

    Example:
        >>> import torch, fitkit
        >>> class Printed(fitkit.loggers.Logger):
        ...     def log_scalars(self, values, step, epoch):
        ...         print(sorted(values))
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> history = model.fit(torch.ones(8, 4), torch.ones(8), verbose=0, callbacks=[Printed()])
        [...'loss'...]

    Raises:
        ArgumentTypeError, ConfigurationError: `update_freq` or `step` is invalid.
    """

    stops_alike = True
    _acts_alone = True
    comes_last = True  # to log what all other callbacks add to an epoch's logs

    def __init__(self, update_freq: str | int = "epoch", step: Unit = "batches") -> None:
        self.update_freq = update_freq
        self.counts_updates: bool = _counts_updates(step)
        self.resumes: bool = False
        self.run_id: str | None = None
        self._every = _every(update_freq)
        self.each_batch: bool = self._every > 0
        if self._every:
            # Only if needed: a batch hook costs a little.
            vars(self)["on_train_batch_end"] = self._after_batch
        self.connection: Any = None
        self._is_open = False
        self._error: BaseException | None = None  # what ended the fit
        self._count_from(0, 0)

    # ------------------------------------------------------------------ for loggers to override

    def start(self) -> None:
        """Act when a fit begins. Open your file or connection here."""

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        """Record the settings: strings, numbers and flags by name, without None."""

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        """Record numbers by name. They may include NaN and infinity.

        Args:
            values: an epoch's logs, or those of a batch, whose names begin with `batch_`.
            step: the number of training batches so far, over all epochs; or of updates.
            epoch: the epoch's number, from 0; None for a batch's values.
        """
        raise NotImplementedError(f"{type(self).__name__} must define log_scalars.")

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        """Record a matplotlib figure. Loggers that keep no pictures ignore it.

        fitkit never calls it. Call it in your own callback, if `model.is_global_zero`.

        Args:
            name: the figure's name.
            figure: the figure. It stays unchanged and open.
            step: the step that it belongs to. Default None: the training's current one.
        """

    def finish(self, error: BaseException | None = None) -> None:
        """Act when the fit has ended, with its `error` if there is one. Close what is open.

        It comes after the last hook of all callbacks, whatever ended the fit.
        """

    def opened(self) -> Any:
        """Return the connection, for `log_figure`, which may be called at the wrong time.

        Raises:
            ConfigurationError: there is no connection.
        """
        if self.connection is None:
            raise ConfigurationError(
                f"{type(self).__name__} writes on rank 0, while fit runs. Call log_figure in a "
                "callback's hook, where self.model.is_global_zero."
            )
        return self.connection

    def writes_with(self) -> Any:
        """Return what the logger calls to write, on rank 0, while fit runs.

        It is torch's `SummaryWriter` of TensorBoard, W&B's run, MLflow's client.

        Raises:
            ConfigurationError: nothing is open, or the logger writes files of its own.
        """
        if self.connection is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no experiment here: it writes files of its own, or no "
                "fit runs on this rank. Call log_scalars, or take a service's logger."
            )
        return self.connection

    # ------------------------------------------------------------------ the moments of a fit

    @property
    def step(self) -> int:
        """The number of training batches so far, over all epochs; or of updates."""
        if not self.counts_updates:
            return self._batches
        return self.model.global_step if hasattr(self, "model") else 0

    @property
    def _batches(self) -> int:
        """The number of training batches so far, over all epochs."""
        model = getattr(self, "model", None)
        run = None if model is None else run_of(model)
        if model is None or run is None or model.current_epoch != self._epoch:
            return self._before + self._made
        return self._before + run.steps_done

    @property
    def next_step(self) -> int:
        """The first step that isn't logged yet: a resumed training writes from there."""
        return self._waiting[0].step if self._waiting else self.step + 1

    def on_train_begin(self, logs: Logs | None = None) -> None:
        first, steps = self.params.get("initial_epoch") or 0, self.params.get("steps")
        self.resumes = first > 0
        if not self.resumes:
            self.run_id = None
        before = self._before + self._made if first else 0
        # A checkpoint that is loaded later overrides this.
        self._count_from(first * steps if steps else before, first)

    def _count_from(self, step: int, epoch: int) -> None:
        """Start to count an epoch's batches, after that many steps."""
        self._before, self._epoch, self._made = step, epoch, 0
        self._batch_losses = BatchLosses()
        self._first = 0  # the first batch of the next moment to log
        self._last_batch, self._seen = -1, step  # the last batch, and the step after it
        self._waiting: list[Moment] = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch != self._epoch:
            self._count_from(self._before + self._made, epoch)
        self._seen = self.step
        # Not when fit begins: only a checkpoint says which run this is, and it is loaded by now.
        if self.model.is_global_zero and not self._is_open:
            self._error = None
            self.add_cleanup(self._close)
            self.start()
            self._is_open = True
            self.log_hyperparameters(hyperparameters_of(self.model, self.params))

    def _after_batch(self, batch: int, logs: Logs) -> None:
        if not self.model.is_global_zero:
            return
        self._batch_losses.add(batch, logs)
        if not self._reaches(batch):
            return
        if self.update_freq != "batch":
            self._log_waiting({f"batch_{name}": value for name, value in scalars(logs).items()})
        elif len(self._waiting) >= READ_EVERY:
            self._log_waiting({})

    def _reaches(self, batch: int) -> bool:
        """Note the moment after a batch, if it is one to log, and say whether it is."""
        step = self.step if self.counts_updates else self._before + batch + 1
        seen, self._seen, self._last_batch = self._seen, step, batch
        if step // self._every == seen // self._every:
            return False
        self._waiting.append(Moment(self._first, batch, step, rate_of(self.model)))
        self._first = batch + 1
        return True

    def _log_waiting(self, running: dict[str, float]) -> None:
        """Log the waiting losses and rates. `running` has further values."""
        losses = dict(self._batch_losses.take())
        waiting, self._waiting = self._waiting, []
        for moment in waiting:
            batches = range(moment.first, moment.last + 1)
            found = [losses[one] for one in batches if one in losses]
            counted = [loss for loss in found if loss is not EMPTY_MEAN]
            mean = {"batch_loss": EMPTY_MEAN} if found else {}
            if counted:
                mean["batch_loss"] = sum(counted) / len(counted)
            values = {**running, **mean, "batch_learning_rate": moment.rate}
            self.log_scalars(values, moment.step, None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._made = self._batches - self._before
        if self.model.is_global_zero:
            if self._every and self.counts_updates:
                self._reaches(self._last_batch)  # an epoch ends with an update of what is left over
            self._log_waiting({})
            self.log_scalars(scalars(logs), self.step, epoch)

    def on_exception(self, error: BaseException) -> None:
        self._error = error
        if self._is_open:
            self._log_waiting({})

    def _close(self) -> None:
        # `start` may have failed after it made the connection.
        if self._is_open or self.connection is not None:
            self._is_open = False
            error, self._error = self._error, None
            self.finish(error)

    # ------------------------------------------------------------------ checkpoints, other ranks

    def state_dict(self) -> dict[str, Any]:
        return {
            "before": self._before,
            "step": self._batches,
            "epoch": self._epoch,
            "run_id": self.run_id or "",
            "losses": self._batch_losses.state(),
            "first": self._first,
            "waiting": [list(moment) for moment in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count_from(state["before"], state["epoch"])
        self._made = state["step"] - state["before"]
        self._batch_losses.restore(state["losses"])
        self._first = int(state["first"])
        self._waiting = [
            Moment(int(first), int(last), int(step), float(rate))
            for first, last, step, rate in state["waiting"]
        ]
        self.run_id = state["run_id"] or None
        self.resumes = True

    def __getstate__(self) -> dict[str, Any]:
        """Send other ranks no open file: they don't write."""
        return {**super().__getstate__(), "connection": None, "_is_open": False}


def _every(update_freq: object) -> int:
    """Return the number of batches between two logs; 0 for epochs only."""
    if isinstance(update_freq, str):
        if update_freq not in ("epoch", "batch"):
            raise ConfigurationError(
                f"update_freq={update_freq!r} must be 'epoch', 'batch' or a number of batches."
            )
        return 1 if update_freq == "batch" else 0
    if isinstance(update_freq, (bool, type(None))) or not isinstance(update_freq, numbers.Integral):
        raise ArgumentTypeError(
            f"update_freq={describe(update_freq)} must be 'epoch', 'batch' or a number of batches."
        )
    update_freq = check_count("update_freq", update_freq)
    return int(update_freq)


def _counts_updates(step: object) -> bool:
    """Whether steps count updates, as the argument `step` says."""
    if step not in ("batches", "updates"):
        raise ConfigurationError(f"step={step!r} must be 'batches' or 'updates'.")
    return step == "updates"


def scalars(logs: Logs) -> dict[str, float]:
    """Return the logs that are one number, as floats. Matrices and texts are left out.

    The names are made valid for files.
    """
    found = {}
    for name, value in logs.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.reshape(())
        plain = plain_value(value)
        if isinstance(plain, numbers.Real):
            found[writable(name)] = float(plain)
    return found


def hyperparameters_of(model: Module, params: dict[str, Any]) -> dict[str, Any]:
    """Collect a training's settings: strings, numbers and flags by name.

    They are the model's own `hparams`, if any, and the arguments of `compile`, with the class and
    rate of a default optimizer. Then come `epochs`, `batch_size` and `world_size`, and the net's
    name and number of parameters. Arguments that are None are left out.
    """
    own = getattr(model, "hparams", None)
    net = model._weights_module()
    return {
        **plain_settings(own if isinstance(own, dict) else {}),
        **plain_settings(model._fitkit.compilation.given.as_dict()),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers_of(model)),
        "learning_rate": rate_of(model),
        **plain_settings({name: params.get(name) for name in ("epochs", "batch_size")}),
        "world_size": model.world_size,
        "net": net._get_name(),
        "parameters": sum(p.numel() for p in net.parameters() if not is_lazy(p)),
    }


def pixels(figure: Any) -> np.ndarray[Any, Any]:
    """Return a figure as (height, width, RGBA) bytes. Its own canvas stays."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    before = figure.canvas
    try:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba()).copy()
    finally:
        figure.set_canvas(before)
