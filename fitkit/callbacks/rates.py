"""Callbacks that set and log learning rates, and how many batches make an update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from fitkit.arguments import check_choice, check_count, check_flag, check_number, describe
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.monitor import Monitor
from fitkit.callbacks.ranks import from_rank_zero, print_on_rank_zero
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.module import Module
from fitkit.optimizers import put_rate


def optimizers_of(model: Module) -> list[Optimizer]:
    """The model's optimizers, in order."""
    found = model.optimizers()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def groups_of(model: Module) -> Iterator[dict[str, Any]]:
    """The parameter groups of all optimizers, in order."""
    for optimizer in optimizers_of(model):
        yield from optimizer.param_groups


def rate_of(model: Module) -> float:
    """The learning rate: the first group's, where there are several."""
    return float(next(groups_of(model))["lr"])


def set_rate(model: Module, rate: float) -> None:
    """Give the first group that rate; the others keep their ratio to it.

    A ratio to a rate of 0 isn't known: all groups get the same rate then.
    """
    before = rate_of(model)
    if before == rate:
        return
    for index, group in enumerate(groups_of(model)):
        own = float(group["lr"])
        put_rate(group, rate if index == 0 or own == before or not before else own / before * rate)


def change_rates(model: Module, change: Callable[[float], float]) -> bool:
    """Replace each group's rate by what a function makes of it; whether any differs now."""
    differs = False
    for group in groups_of(model):
        before = float(group["lr"])
        after = change(before)
        if after != before:
            put_rate(group, after)
            differs = True
    return differs


def updates_of(model: Module) -> int:
    """How many updates the model's weights have had."""
    return int(model._fitkit.fit_state.updates)


def refuse_scheduler(model: Module, callback: str) -> None:
    """Refuse two that set the same rates.

    Raises:
        ConfigurationError: there is a learning-rate scheduler.
    """
    if model._fitkit.fit_state.schedulers:
        raise ConfigurationError(
            f"{callback} sets the learning rate, and so does the lr_scheduler. Keep one of them: "
            "leave the callback out, or write model.compile(lr_scheduler=None)."
        )


class LearningRateScheduler(Callback):
    """Sets the learning rate at each epoch's begin, and logs it as `learning_rate`.

    Args:
        schedule: `schedule(epoch, rate) -> rate` or `schedule(epoch) -> rate`; epochs count from
            0. Called on rank 0. Where there are several parameter groups, the first has this
            rate and the others keep their ratio to it.
        verbose: 1 says each epoch's rate. Default 0.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        ... ])

    Raises:
        ArgumentTypeError: no function of one or two arguments, or one that gives no number.
        ConfigurationError: when fit begins, a scheduler that sets the rates too; a rate below 0.
    """

    stops_alike = True

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        check_choice("verbose", verbose, (0, 1, False, True))
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
                f"The schedule gave {describe(given)} for epoch {epoch}; it must give a number."
            ) from None
        if not 0 <= number < float("inf"):
            raise ConfigurationError(
                f"The schedule gave the rate {number} for epoch {epoch}; it must be finite and at "
                "least 0."
            )
        return number

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.setdefault("learning_rate", rate_of(self.model))


def _takes_rate(schedule: object) -> bool:
    """Whether a schedule takes the rate beside the epoch.

    By its signature: trying it with two arguments would hide errors that come from inside it.
    """
    if not callable(schedule):
        raise ArgumentTypeError(
            f"schedule={describe(schedule)} must be a function (epoch, rate) -> rate."
        )
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # A builtin that doesn't tell.
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

    Further parameter groups get `learning_rate_1`, and so on, through all optimizers. A group that
    has a `"name"` gets `learning_rate/<name>`. A scheduler to which `configure_optimizers` gives a
    `"name"` has it in the place of `learning_rate` (and `<name>-momentum`,
    `<name>-weight_decay`) for its optimizer's groups, which are numbered for themselves.

    Args:
        logging_interval: `"step"` keeps each step's rate too; `"epoch"` or None (default) not.
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

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        check_choice("logging_interval", logging_interval, (None, "step", "epoch"))
        check_flag("log_momentum", log_momentum)
        check_flag("log_weight_decay", log_weight_decay)
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.rates: list[float] = []
        self._used: list[Any] = []
        self._optimizers: list[Optimizer] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizers": []}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.rates = []
        # Asking the model for them looks through all parameters: not at each batch.
        self._optimizers = optimizers_of(self.model)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        # At a batch's end a scheduler that counts steps has moved on already.
        self._used = [group["lr"] for group in self._groups()]
        if self.logging_interval == "step":
            self.rates.append(float(self._used[0]))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        groups = self._groups()
        self._add(logs, "learning_rate", self._used)
        if self.log_momentum:
            self._add(logs, "momentum", [_momentum(group) for group in groups])
        if self.log_weight_decay:
            self._add(logs, "weight_decay", [group.get("weight_decay") for group in groups])

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._optimizers = []

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _add(self, logs: dict[str, Any], name: str, values: list[Any]) -> None:
        for key, value in zip(self._names(name), values, strict=True):
            if value is not None:
                logs[key] = float(value)

    def _names(self, name: str) -> list[str]:
        """What one setting is called for each group."""
        named = {
            id(plan.optimizer): plan.name
            for plan in self.model._fitkit.fit_state.schedulers
            if plan.name is not None
        }
        found, unnamed = [], 0
        for optimizer in self._optimizers:
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
"""What a checkpoint keeps of it."""


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rates when the monitored value has not improved for some epochs.

    Adds `learning_rate`, the rate that the epoch used, to the epoch's logs.

    Args:
        monitor: a name of the epoch's logs. Default `"val_loss"`. Where `fit` validates several
            times an epoch, each validation counts in place of an epoch.
        factor: by which the rates are multiplied, above 0 and below 1. Default 0.1.
        patience: epochs without improvement after which to do so. Default 10.
        verbose: 1 says it. Default 0.
        mode: `"min"`, `"max"` or `"auto"` (default): by the name, where it tells.
        min_delta: the least improvement that counts. Default 1e-4.
        cooldown: epochs after a reduction in which nothing is counted. Default 0.
        min_lr: no rate becomes lower. Default 0.

    Attributes:
        best: the best value so far.
        wait: epochs since.
        cooldown_counter: epochs of the cooldown that are left.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1)
        ... ])

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be; when fit begins, a
            scheduler that sets the rates too.
    """

    stops_alike = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        check_number("factor", factor, above=0, below=1)
        check_count("patience", patience, minimum=0)
        check_choice("verbose", verbose, (0, 1, False, True))
        check_count("cooldown", cooldown, minimum=0)
        check_number("min_lr", min_lr, minimum=0)
        self.monitor = monitor
        self._watch = Monitor(monitor, mode, min_delta, type(self).__name__, within_epochs=True)
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best: float = self._watch.worst
        self.wait: int = 0
        self.cooldown_counter: int = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        refuse_scheduler(self.model, type(self).__name__)
        self._reset()
        self._watch.begin(self.model, self.params)

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        value = self._watch.read_within(self.model, self.params, logs)
        self._take(value, self.model.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.setdefault("learning_rate", rate_of(self.model))
        self._take(self._watch.read(self.model, self.params, logs), epoch)

    def _take(self, value: float | None, epoch: int) -> None:
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._watch.better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        if not change_rates(self.model, self._lowered):
            return  # All are at their lowest.
        self.cooldown_counter = self.cooldown
        self.wait = 0
        if self.verbose:
            rate = rate_of(self.model)
            print_on_rank_zero(
                self.model, f"Epoch {epoch + 1}: the learning rate becomes {rate:.4g}."
            )

    def _lowered(self, rate: float) -> float:
        return rate if rate <= self.min_lr else max(rate * self.factor, self.min_lr)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update((name, state[name]) for name in KEPT)


class GradientAccumulationScheduler(Callback):
    """Sets, from given epochs on, how many batches' gradients make one update.

    Args:
        scheduling: epoch (from 0) → number of batches: `{0: 8, 4: 2}` accumulates 8 batches
            in the epochs 0 to 3, then 2. Epochs before the first one keep what compile was
            given as `accumulate_grad_batches`, and so do later fits.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.GradientAccumulationScheduler({1: 2})
        ... ])

    Raises:
        ConfigurationError, ArgumentTypeError: an empty dict, epochs below 0, numbers below 1.
    """

    stops_alike = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not isinstance(scheduling, Mapping):
            raise ArgumentTypeError(
                f"scheduling={describe(scheduling)} must be a dict of epochs and numbers of "
                "batches, like {0: 8, 4: 2}."
            )
        if not scheduling:
            raise ConfigurationError("scheduling={} has no epoch; write it like {0: 8, 4: 2}.")
        for epoch, number in scheduling.items():
            check_count("scheduling's epoch", epoch, minimum=0)
            check_count(f"scheduling[{epoch}]", number)
        self.scheduling: dict[int, int] = dict(sorted(scheduling.items()))

    def batches_in(self, epoch: int) -> int | None:
        """How many batches make an update in that epoch; None where it isn't said."""
        begun = [number for first, number in self.scheduling.items() if first <= epoch]
        return begun[-1] if begun else None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.model._fitkit.compilation.effective_batch_size is not None:
            raise ConfigurationError(
                "GradientAccumulationScheduler sets how many batches make an update, and so does "
                "compile(effective_batch_size=…). Leave one of them out."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        number = self.batches_in(epoch)
        if number is not None:
            state: Any = self.model._fitkit.fit_state
            state.accumulate = number
