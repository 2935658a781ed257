"""Callbacks that set or log learning rates, or set the number of batches per update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.arguments import (
    check_choice,
    check_count,
    check_epochs,
    check_flag,
    check_number,
    describe,
)
from fitkit.callbacks.base import Callback, Logs, from_rank_zero, print_on_rank_zero
from fitkit.callbacks.batch_sizes import SetsAccumulation, value_in
from fitkit.callbacks.monitor import Monitor
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.seams.networks import Module
from fitkit.seams.optimizers import put_rate
from fitkit.typing import Mode


def optimizers_of(model: Module) -> list[Optimizer]:
    """Return the model's optimizers, in order."""
    return list(model._made_optimizers())


def groups_of(model: Module) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of all optimizers, in order."""
    for optimizer in optimizers_of(model):
        yield from optimizer.param_groups


def rate_of(model: Module) -> float:
    """Return the learning rate. With several groups, the first group's."""
    return float(next(groups_of(model))["lr"])


def set_rate(model: Module, rate: float) -> None:
    """Give the first group that rate. The others keep their ratio to it.

    If the rate was 0, the ratio isn't known, and all groups get the same rate.
    """
    before = rate_of(model)
    if before == rate:
        return
    for index, group in enumerate(groups_of(model)):
        own = float(group["lr"])
        put_rate(group, rate if index == 0 or own == before or not before else own / before * rate)


def refuse_scheduler(model: Module, callback: str) -> None:
    """Refuse a callback that sets the rates if a scheduler sets them, too.

    Raises:
        ConfigurationError: there is a learning-rate scheduler.
    """
    if model._fitkit.fit_state.schedulers:
        raise ConfigurationError(
            f"{callback} sets the learning rate, and so does the lr_scheduler. Keep one of them: "
            "leave the callback out, or write model.compile(lr_scheduler=None)."
        )


class LearningRateScheduler(Callback):
    """Sets the learning rate at the start of each epoch, and logs it as `learning_rate`.

    Args:
        schedule: a function `schedule(epoch, rate) -> rate` or `schedule(epoch) -> rate`. Epochs
            count from 0. It is called on rank 0. With several parameter groups, the first gets
            this rate, and the others keep their ratio to it.
        verbose: 1 prints each epoch's rate. Default 0.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        ... ])

    Raises:
        ArgumentTypeError: `schedule` isn't a function of one or two arguments, or doesn't return a
            number.
        ConfigurationError: a scheduler also sets the rates (when fit begins), or a rate is below 0.
    """

    stops_alike = True

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        verbose = check_choice("verbose", verbose, (0, 1, False, True))
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_rate(schedule)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        refuse_scheduler(self.model, type(self).__name__)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        asked = self._asked(epoch) if self.model.is_global_zero else None
        rate = from_rank_zero(self.model, asked)
        assert rate is not None
        set_rate(self.model, rate)
        if self.verbose:
            print_on_rank_zero(self.model, f"Epoch {epoch + 1}: the learning rate is {rate:.4g}.")

    def _asked(self, epoch: int) -> float:
        rate = rate_of(self.model)
        given = self.schedule(epoch, rate) if self._takes_rate else self.schedule(epoch)
        try:
            number = float(given)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"The schedule returned {describe(given)} for epoch {epoch}. It must return a "
                "number."
            ) from None
        if not 0 <= number < float("inf"):
            raise ConfigurationError(
                f"The schedule returned the rate {number} for epoch {epoch}. It must be finite "
                "and at least 0."
            )
        return number

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.setdefault("learning_rate", rate_of(self.model))


def _takes_rate(schedule: object) -> bool:
    """Whether a schedule takes the rate besides the epoch.

    Its signature decides. Trying it with two arguments would hide errors from inside it.
    """
    if not callable(schedule):
        raise ArgumentTypeError(
            f"schedule={describe(schedule)} must be a function (epoch, rate) -> rate."
        )
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # a builtin without a signature
        return False
    for arguments in ((0, 0.0), (0,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise ArgumentTypeError(f"schedule takes {signature}; it must take (epoch, rate) or (epoch).")


class LearningRateMonitor(Callback):
    """Adds `learning_rate`, the rate of the epoch's last step, to the epoch's logs.

    Further parameter groups get `learning_rate_1` and so on, counted over all optimizers. A group
    that has a `"name"` gets `learning_rate/<name>`. You can also give a scheduler a `"name"` in
    `configure_optimizers`. It then replaces `learning_rate` for the groups of that optimizer (with
    `<name>-momentum` and `<name>-weight_decay`), which are counted separately.

    Args:
        logging_interval: `"step"` also keeps the rate of each step. `"epoch"` or None (default)
            doesn't.
        log_momentum: whether to add `momentum` (Adam's first beta). Default False.
        log_weight_decay: whether to add `weight_decay`. Default False.

    Attributes:
        rates: with `"step"`, the first group's rate at each step of the last fit.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.LearningRateMonitor()
        ... ])
    """

    stops_alike = True
    each_batch = True  # a schedule may move the rates between two batches of a group

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        logging_interval = check_choice(
            "logging_interval", logging_interval, (None, "step", "epoch")
        )
        log_momentum = check_flag("log_momentum", log_momentum)
        log_weight_decay = check_flag("log_weight_decay", log_weight_decay)
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.rates: list[float] = []
        self._used: list[Any] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.rates, self._used = [], []

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        # At the end of a batch, a scheduler that counts steps has already moved on.
        self._used = [group["lr"] for group in self._groups()]
        if self.logging_interval == "step":
            self.rates.append(float(self._used[0]))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        groups = self._groups()
        # Empty if a resumed epoch had no batch left, and its checkpoint nothing of this callback.
        self._add(logs, "learning_rate", self._used or [group["lr"] for group in groups])
        if self.log_momentum:
            self._add(logs, "momentum", [_momentum(group) for group in groups])
        if self.log_weight_decay:
            self._add(logs, "weight_decay", [group.get("weight_decay") for group in groups])

    def state_dict(self) -> dict[str, Any]:
        return {
            "used": [float(rate) for rate in self._used],
            "rates": torch.tensor(self.rates, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # older versions kept nothing
            self._used, self.rates = list(state["used"]), state["rates"].tolist()

    def _optimizers(self) -> list[Optimizer]:
        # As fit has made them: `optimizers_of` looks through all parameters, too long for a batch.
        found: list[Optimizer] = self.model._fitkit.fit_state.optimizers
        return found

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers() for group in optimizer.param_groups]

    def _add(self, logs: dict[str, Any], name: str, values: list[Any]) -> None:
        for key, value in zip(self._names(name), values, strict=True):
            if value is not None:
                logs[key] = float(value)

    def _names(self, name: str) -> list[str]:
        """Return the name of one setting for each group."""
        named = {
            id(plan.optimizer): plan.name
            for plan in self.model._fitkit.fit_state.schedulers
            if plan.name is not None
        }
        found, unnamed = [], 0
        for optimizer in self._optimizers():
            own = named.get(id(optimizer))
            base = name if own is None else own if name == "learning_rate" else f"{own}-{name}"
            for index, group in enumerate(optimizer.param_groups):
                number = unnamed if own is None else index
                unnamed += own is None
                label = group.get("name")
                if label is not None:
                    found.append(f"{base}/{label}")
                else:
                    found.append(f"{base}_{number}" if number else base)
        return found


def _momentum(group: dict[str, Any]) -> Any:
    betas = group.get("betas")
    return betas[0] if betas else group.get("momentum")


KEPT = ("best", "wait", "cooldown_counter")
"""The attributes that a checkpoint keeps."""


class ReduceLROnPlateau(Callback):
    """Lowers the learning rates when the monitored value has stopped improving.

    It also adds `learning_rate`, the rate that the epoch used, to the epoch's logs.

    Args:
        monitor: the name of a value in the epoch's logs. Default `"val_loss"`. If `fit` validates
            several times per epoch, each validation counts as an epoch.
        factor: the factor by which the rates are multiplied, above 0 and below 1. Default 0.1.
        patience: the number of epochs without improvement after which to lower them. Default 10.
        verbose: 1 prints each reduction. Default 0.
        mode: `"min"`, `"max"` or `"auto"` (default), which infers it from the name.
        min_delta: the smallest improvement that counts. Default 1e-4.
        cooldown: the number of epochs after a reduction in which nothing counts. Default 0.
        min_lr: a lower limit for the rates. Default 0.

    Attributes:
        best: the best value so far.
        wait: the number of epochs since the best.
        cooldown_counter: the number of epochs left in the cooldown.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1)
        ... ])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also when fit begins, if a
            scheduler also sets the rates.
    """

    stops_alike = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        factor = check_number("factor", factor, above=0, below=1)
        patience = check_count("patience", patience, minimum=0)
        verbose = check_choice("verbose", verbose, (0, 1, False, True))
        cooldown = check_count("cooldown", cooldown, minimum=0)
        min_lr = check_number("min_lr", min_lr, minimum=0)
        self.monitor = monitor
        self._monitored = Monitor(monitor, mode, min_delta)
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best: float = self._monitored.worst
        self.wait: int = 0
        self.cooldown_counter: int = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        refuse_scheduler(self.model, type(self).__name__)
        self._reset()
        self._monitored.begin(self)

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        value = self._monitored.read_within(self, logs)
        self._take(value, self.model.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.setdefault("learning_rate", rate_of(self.model))
        self._take(self._monitored.read(self, logs), epoch)

    def _take(self, value: float | None, epoch: int) -> None:
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._monitored.better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        lowered = [group for group in groups_of(self.model) if float(group["lr"]) > self.min_lr]
        if not lowered:
            return
        for group in lowered:
            put_rate(group, max(float(group["lr"]) * self.factor, self.min_lr))
        self.cooldown_counter = self.cooldown
        self.wait = 0
        if self.verbose:
            rate = rate_of(self.model)
            print_on_rank_zero(
                self.model, f"Epoch {epoch + 1}: the learning rate becomes {rate:.4g}."
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update((name, state[name]) for name in KEPT)


class GradientAccumulationScheduler(SetsAccumulation, Callback):
    """Sets the number of batches per update from given epochs on.

    Args:
        scheduling: a dict from epoch (from 0) to number of batches. `{0: 8, 4: 2}` accumulates 8
            batches in epochs 0 to 3, then 2. Epochs before the first one, and later fits, use
            `compile`'s `accumulate_grad_batches`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.GradientAccumulationScheduler({1: 2})
        ... ])

    Raises:
        ConfigurationError, ArgumentTypeError: the dict is empty, an epoch is below 0, or a number
            is below 1.
    """

    stops_alike = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        example = "{0: 8, 4: 2}"
        by_epoch = check_epochs(
            "scheduling", scheduling, what="numbers of batches", example=example
        )
        self.scheduling: dict[int, int] = {
            epoch: check_count(f"scheduling[{epoch}]", number) for epoch, number in by_epoch.items()
        }

    def batches_in(self, epoch: int) -> int | None:
        """Return the number of batches per update in an epoch; None if the schedule doesn't say."""
        return value_in(self.scheduling, epoch, None)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.model._fitkit.compilation.given.effective_batch_size is not None:
            raise ConfigurationError(
                "GradientAccumulationScheduler sets how many batches make an update, and so does "
                "compile(effective_batch_size=…). Leave one of them out."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        number = self.batches_in(epoch)
        if number is not None:
            state: Any = self.model._fitkit.fit_state
            state.accumulate = number
