"""Where an epoch's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fitkit.arguments import check_count, check_flag
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.monitor import announce_prefix
from fitkit.callbacks.part_clock import PartClock
from fitkit.callbacks.profiler_table import TITLES, Facts, table, with_waits
from fitkit.callbacks.ranks import from_all_ranks, say
from fitkit.callbacks.run_parts import CALLBACKS, VALIDATION, Timed, TimedParts
from fitkit.data.arrays import ArraySource
from fitkit.data.by_index import reads_by_index
from fitkit.errors import ConfigurationError
from fitkit.optimizers import FUSED, class_of

if TYPE_CHECKING:
    from fitkit.model import Model

Hook = Callable[..., Any]
Hooks = dict[str, tuple[Hook, ...]]
PREFIX = "seconds/"


class Profiler(Callback):
    """Prints at an epoch's end where its time went, and what to do about it.

    The parts are `"data"` (waiting for the next batch), `"to device"`, `"forward"` (with the loss,
    and whatever else a step of your own does), `"backward"`, `"optimizer"` (with clipping),
    `"metrics"` (with logs), `"callbacks"`, `"ranks"` (waiting for other ranks), `"validation"` and
    `"rest"`. Together they are the epoch's whole time.

    On a GPU they are the GPU's: data that are ready before it has finished cost nothing. Nothing
    waits for it but the end of the epoch. A fit without this callback pays nothing for it; with it
    a step takes some 20 µs more.

    Args:
        every: print after every so many epochs; 0 never, for programs that read the attributes.
            Default 1.
        log: whether to add the seconds to the epoch's logs, as `seconds/data` and so on, and so to
            the history. They are without the callbacks that come after this one. Default False.

    Attributes:
        seconds: the last epoch's seconds by part, of this rank.
        wall_s: the last epoch's seconds by the clock.
        ranks: the last epoch's seconds by part of each rank. As gradients are exchanged within the
            backward pass, what a rank's takes longer than the shortest rank's is in `"ranks"`.
        epochs: `seconds` of each epoch of the last fit.
        callbacks: the last epoch's seconds of each callback, by class.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> profiler = fitkit.callbacks.Profiler(every=0)  # prints no table
        >>> x, y = torch.rand(64, 2), torch.rand(64, 1)
        >>> history = model.fit(x, y, verbose=0, callbacks=profiler)
        >>> profiler.seconds["data"] < profiler.wall_s
        True
    """

    stops_alike = True

    def __init__(self, every: int = 1, log: bool = False) -> None:
        check_count("every", every, minimum=0)
        check_flag("log", log)
        self.every = every
        self.log = log
        self.seconds: dict[str, float] = {}
        self.wall_s = 0.0
        self.ranks: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.callbacks: dict[str, float] = {}
        self._clock: PartClock | None = None
        self._parts: TimedParts | None = None
        self._began_s = 0.0
        self._before_validation = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_clock": None, "_parts": None}

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if self.log:
            announce_prefix(params, PREFIX)

    def around_hooks(self, hooks: Hooks) -> Hooks:
        """The run's hooks, each with a clock around it; this callback's own begin and end them."""
        if self.params.get("stage") != "fit":
            return hooks
        found = {
            name: tuple(hook if _owner(hook) is self else self._timed(hook) for hook in these)
            for name, these in hooks.items()
        }
        first: dict[str, Hook] = {
            "on_epoch_begin": self._begin_epoch,
            "on_test_begin": self._begin_validation,
        }
        last: dict[str, Hook] = {
            "on_epoch_end": self._end_epoch,
            "on_test_end": self._end_validation,
        }
        found.update({name: (hook, *found[name]) for name, hook in first.items()})
        found.update({name: (*found[name], hook) for name, hook in last.items()})
        return found

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A callback's hook, whose time counts for the callbacks."""
        name = _named(hook)

        def timed(*arguments: Any) -> Any:
            clock = self._clock
            if clock is None:
                return hook(*arguments)
            before, began = clock.switch(CALLBACKS), time.perf_counter()
            try:
                return hook(*arguments)
            finally:
                clock.switch(before)
                passed = time.perf_counter() - began
                self.callbacks[name] = self.callbacks.get(name, 0.0) + passed

        return timed

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epochs = []
        run = self.model._fitkit.fit_state.run
        assert run is not None
        self._close()
        if isinstance(vars(run)["learn"], Timed):
            raise ConfigurationError("fit was given two Profilers. One is enough; leave one out.")
        self._clock = PartClock(self.model.device)
        self._parts = TimedParts(run, self._clock)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.log and self._clock is not None:
            self._take()
            logs.update({PREFIX + part: self.seconds.get(part, 0.0) for part in TITLES})

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._close()

    def on_exception(self, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._parts is not None:
            self._parts.undo()
        self._clock = self._parts = None

    def _begin_epoch(self, epoch: int, logs: Logs | None = None) -> None:
        if self._clock is not None:
            self._clock.take()  # what was before this epoch
            self.seconds, self.callbacks = {}, {}
            self._began_s = time.perf_counter()

    def _begin_validation(self, logs: Logs | None = None) -> None:
        if self._clock is not None:
            self._before_validation = self._clock.switch(VALIDATION)

    def _end_validation(self, logs: Logs) -> None:
        if self._clock is not None:
            self._clock.switch(self._before_validation)

    def _take(self) -> None:
        """Add what the clock has to the epoch's seconds."""
        assert self._clock is not None
        for part, seconds in self._clock.take().items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._clock is None:
            return
        self._take()
        self.wall_s = time.perf_counter() - self._began_s
        self.epochs.append(self.seconds)
        self.ranks = with_waits(from_all_ranks(self.model, self.seconds))
        if self.every and (epoch + 1) % self.every == 0:
            epochs = self.params.get("epochs", epoch + 1)
            title = f"Epoch {epoch + 1}/{epochs} took {self.wall_s:,.3f} s:"
            say(self.model, table(title, self.ranks, _facts(self.model), self.callbacks))


def _owner(hook: Callable[..., Any]) -> Any:
    """The callback that a hook belongs to; None for a function that somebody put there."""
    return getattr(hook, "__self__", None)


def _named(hook: Callable[..., Any]) -> str:
    """What a hook's time is noted by: its callback's class, or the function's own name."""
    owner = _owner(hook)
    name: str = getattr(hook, "__qualname__", "?") if owner is None else type(owner).__name__
    return name


def _facts(model: Model) -> Facts:
    """What is known of the run, for advice."""
    run: Any = model._fitkit.fit_state.run
    source = run.source
    while hasattr(source, "source"):
        source = source.source  # a rank's share
    loader = getattr(source, "loader", None)
    is_named = (
        model._fitkit.compilation.names_optimizer and model._fitkit.compilation.optimizer.is_name
    )
    return Facts(
        is_loader=loader is not None,
        workers=getattr(loader, "num_workers", 0),
        in_memory=isinstance(source, ArraySource) if loader is None else reads_by_index(loader),
        may_fuse=not is_named
        and any(
            class_of(optimizer) in FUSED and not all(g.get("fused") for g in optimizer.param_groups)
            for optimizer in run.optimizers
        ),
    )
