"""Where an epoch's time goes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fitkit.arguments import check_count, check_flag
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.ranks import from_all_ranks, say
from fitkit.data.arrays import ArraySource
from fitkit.data.loaders import reads_by_index
from fitkit.errors import ConfigurationError
from fitkit.module import Module
from fitkit.optimizers import FUSED, class_of

if TYPE_CHECKING:
    from fitkit.training.fit_run import FitRun


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


def _facts(model: Module) -> Facts:
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


REST = "rest"
LONGEST_QUEUE = 512
"""CUDA events that may wait to be read; beyond, those that have come are."""


class PartClock:
    """Seconds by part of the work.

    Args:
        device: whose time counts. On a GPU the marks are CUDA events, which the GPU reaches in its
            own time: nobody waits for it, and what it does while the host waits for data counts
            as its work. Elsewhere marks are times of the host's clock.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._marks: Marks = HostMarks()
        if device is not None and device.type == "cuda":
            self._marks = EventMarks(device)
        self._thread = threading.get_ident()
        self.part = REST

    def switch(self, part: str) -> str:
        """Let the time from now on count for `part`; the part for which it counted before."""
        before, self.part = self.part, part
        self._marks.mark(before)
        return before

    def around(
        self, function: Callable[..., Any], part: str, then: str | None = None
    ) -> Callable[..., Any]:
        """`function`, whose time counts for `part`.

        Args:
            part: what the time counts for; what is timed within by itself doesn't.
            then: what the time after the call counts for, by default the same as before.
        """

        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:  # replicas compute in threads
                return function(*arguments, **options)
            before = self.switch(part)
            try:
                return function(*arguments, **options)
            finally:
                self.switch(then or before)

        return timed

    def waiting(self, entries: Iterator[Any], part: str) -> Iterator[Any]:
        """The entries of an iterator; the time until each comes counts for `part`."""
        while True:
            before = self.switch(part)
            try:
                entry = next(entries)
            except StopIteration:
                return
            finally:
                self.switch(before)
            yield entry

    def take(self) -> dict[str, float]:
        """The seconds by part since the last time; on a GPU this waits for it."""
        self.switch(self.part)
        return self._marks.take()


class Marks:
    """Moments between parts."""

    def mark(self, part: str) -> None:
        """What has passed since the last moment was for `part`."""
        raise NotImplementedError

    def take(self) -> dict[str, float]:
        """The seconds by part since the last time."""
        raise NotImplementedError


class HostMarks(Marks):
    """Times of the host's clock."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        found, self._seconds = self._seconds, {}
        return found


class EventMarks(Marks):
    """CUDA events in a GPU's current stream; their distances are read once it has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []
        self._queue: deque[tuple[str, Any]] = deque()  # parts, and the events that end them
        self._seconds: dict[str, float] = {}
        self._since = self._recorded()

    def mark(self, part: str) -> None:
        self._queue.append((part, self._recorded()))
        if len(self._queue) > LONGEST_QUEUE:
            while len(self._queue) > 1 and self._queue[0][1].query():
                self._read()

    def take(self) -> dict[str, float]:
        self._queue[-1][1].synchronize()
        while self._queue:
            self._read()
        found, self._seconds = self._seconds, {}
        return found

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        """Take the oldest event out of the queue."""
        part, event = self._queue.popleft()
        passed = self._since.elapsed_time(event) / 1e3
        self._seconds[part] = self._seconds.get(part, 0.0) + passed
        self._free.append(self._since)
        self._since = event


DATA, DEVICE, FORWARD, BACKWARD = "data", "to device", "forward", "backward"
OPTIMIZER, METRICS, CALLBACKS = "optimizer", "metrics", "callbacks"
RANKS, VALIDATION = "ranks", "validation"
EXCHANGES = ("gather", "broadcast", "scatter", "sums", "broadcast_tensors", "mean_gradients")


class TimedParts:
    """Times a run's parts by a clock, from now until `undo`.

    The run's objects get attributes that cover their methods, so that a run which nobody watches
    pays nothing. Whatever a step does that isn't another part counts as its forward.

    Args:
        run: the `fit` that runs.
        clock: what counts.
    """

    def __init__(self, run: FitRun, clock: PartClock) -> None:
        self._clock = clock
        self._undo: list[Callable[[], Any]] = []
        self._cover_batches(run.stream, "epoch", DATA)
        self._cover(run, "learn", FORWARD)
        step: Any = run.step
        # On a GPU batches are brought there before the step has them.
        self._cover_batches(step.mover, "fed", DEVICE)
        # A compiled step has bound what moves its batches; steps of a model's own ask the mover.
        if hasattr(step, "_move"):
            self._cover(step, "_move", DEVICE)
        else:
            self._cover(step.mover, "transfer", DEVICE)
        meters = step.logbook.meters
        for name in ("update", "results", "state", "merge"):
            self._cover(meters, name, METRICS)
        self._cover(run.stage, "log", METRICS)
        for updater in updaters_of(run.learn):
            self._cover(updater, "backward", BACKWARD, then=OPTIMIZER)
        if run.stage.backward is not None:
            self._cover(run.stage, "backward", BACKWARD)
        for optimizer in run.optimizers:
            self._cover_optimizer(optimizer)
        for collectives in {id(c): c for c in (run.collectives, run.strategy.shares)}.values():
            if collectives.world_size > 1:
                for name in EXCHANGES:
                    self._cover(collectives, name, RANKS)

    def undo(self) -> None:
        """Leave the run's objects as they were."""
        while self._undo:
            self._undo.pop()()

    def _cover(self, owner: Any, name: str, part: str, then: str | None = None) -> None:
        own = vars(owner)
        had, before = name in own, getattr(owner, name)
        setattr(owner, name, Timed(before, self._clock.around(before, part, then)))
        self._undo.append(
            (lambda: setattr(owner, name, before)) if had else (lambda: delattr(owner, name))
        )

    def _cover_batches(self, owner: Any, name: str, part: str) -> None:
        """Cover a method that gives an iterator of batches."""
        make, clock = getattr(owner, name), self._clock

        def timed(*arguments: Any) -> Iterator[Any]:
            # Making the iterator may start workers, or draw an order.
            return clock.waiting(clock.around(make, part)(*arguments), part)

        setattr(owner, name, timed)
        self._undo.append(lambda: delattr(owner, name))

    def _cover_optimizer(self, optimizer: Any) -> None:
        clock = self._clock
        before = FORWARD

        def begin(*given: Any) -> None:
            nonlocal before
            before = clock.switch(OPTIMIZER)

        def end(*given: Any) -> None:
            # Clipping counts for the optimizer, from the backward pass on. After the update another
            # optimizer's forward may begin.
            clock.switch(FORWARD if before == OPTIMIZER else before)

        handles = [
            optimizer.register_step_pre_hook(begin),
            optimizer.register_step_post_hook(end),
        ]
        self._undo += [handle.remove for handle in handles]


class Timed:
    """An object that is called by way of a clock; all else is the object's own."""

    def __init__(self, covered: Any, call: Callable[..., Any]) -> None:
        vars(self).update(_covered=covered, _call=call)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._covered, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._covered, name, value)


def updaters_of(learn: Any) -> list[Any]:
    """What makes the updates: one an optimizer; none where a model makes them itself."""
    learners = getattr(learn, "_learners", [learn])
    return [learner._updater for learner in learners if hasattr(learner, "_updater")]


TITLES = {
    DATA: "waiting for data",
    DEVICE: "host to device",
    FORWARD: "forward and loss",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    METRICS: "metrics and logs",
    CALLBACKS: "callbacks",
    RANKS: "waiting for ranks",
    VALIDATION: "validation",
    REST: "the rest",
}
"""The parts in the table's order, and what it calls them."""

NOTABLE = {
    DATA: 0.2,
    DEVICE: 0.1,
    OPTIMIZER: 0.3,
    METRICS: 0.15,
    CALLBACKS: 0.1,
    RANKS: 0.15,
    VALIDATION: 0.4,
    REST: 0.25,
}
"""From which share of the time on there is something to say about a part."""

ADVICE = {
    DEVICE: "give the DataLoader pin_memory=True, and x in the dtype that the net takes.",
    OPTIMIZER: "larger batches or accumulate_grad_batches make fewer updates.",
    METRICS: "name metrics (metrics=['accuracy']) instead of giving objects, or give those that "
    "only the validation needs to evaluate().",
    RANKS: "some ranks have more work or slower data than others: see their columns; larger "
    "batches or accumulate_grad_batches make fewer exchanges.",
    VALIDATION: "validate less often (validation_freq=5), on fewer batches (validation_steps), or "
    "in larger ones (validation_batch_size).",
    REST: "the steps are so short that the loop counts: take larger batches.",
}
IN_THE_NET = (
    "the net itself takes the time: larger batches, precision='bf16-mixed' or jit_compile=True on "
    "a GPU, more devices."
)
UNFUSED = "name the optimizer in compile (optimizer='adam'), or give yours fused=True; "


@dataclasses.dataclass
class Facts:
    """What is known of a run, for advice.

    Attributes:
        is_loader: whether the batches come from a `DataLoader`.
        workers: of the loader.
        in_memory: whether the batches are cut from tensors that are there.
        may_fuse: whether the optimizer could update all weights in one kernel, and doesn't.
    """

    is_loader: bool = False
    workers: int = 0
    in_memory: bool = False
    may_fuse: bool = False

    @property
    def about_data(self) -> str:
        """What to do where the training waits for data."""
        if self.in_memory:
            return "the steps are so short that taking rows counts: take larger batches."
        if not self.is_loader:
            return (
                "give fit arrays or tensors that are in memory, or a DataLoader with num_workers."
            )
        if self.workers == 0:
            return (
                "give the DataLoader num_workers=4 and persistent_workers=True, or give fit the "
                "arrays themselves where they fit in memory."
            )
        return (
            f"give the DataLoader more than {self.workers} workers or a larger prefetch_factor, or "
            "make what a sample takes cheaper."
        )


def table(
    title: str,
    ranks: Sequence[dict[str, float]],
    facts: Facts,
    callbacks: dict[str, float],
) -> str:
    """An epoch as text: rank 0's seconds by part, beside those of the rank that others wait for.

    Args:
        title: the first line.
        ranks: seconds by part of each rank.
        facts: where the batches come from.
        callbacks: rank 0's seconds of each callback, by class.
    """
    slowest = slowest_of(ranks)
    shown = sorted({0, slowest})
    lines = [title]
    if len(ranks) > 1:
        heads = [f"rank {rank}" + " (the slowest)" * (rank == slowest) for rank in shown]
        lines.append(" " * 18 + "".join(f"{head:>24}" for head in heads))
    for part, name in TITLES.items():
        if any(part in seconds for seconds in ranks):
            lines.append(f"{name:18}" + "".join(_cell(ranks[rank], part) for rank in shown))
    lines += [f"-> {line}" for line in advice(ranks[0], facts, callbacks)]
    return "\n".join(lines)


def _cell(seconds: dict[str, float], part: str) -> str:
    """A part's seconds and share of the whole."""
    spent = seconds.get(part, 0.0)
    return f"{spent:12,.3f} s {spent / max(sum(seconds.values()), 1e-9):9.1%}"


def slowest_of(ranks: Sequence[dict[str, float]]) -> int:
    """The rank that waited least for others."""
    return min(range(len(ranks)), key=lambda rank: ranks[rank].get(RANKS, 0.0))


def with_waits(ranks: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The ranks' seconds with the waits inside their backward passes as waits.

    Gradients are exchanged within the backward pass: a rank that is there early waits in it for
    the last. What a rank's takes longer than the shortest one is taken for that wait.
    """
    shortest = min(seconds.get(BACKWARD, 0.0) for seconds in ranks)
    found = []
    for seconds in ranks:
        wait = seconds.get(BACKWARD, 0.0) - shortest
        moved = {BACKWARD: shortest, RANKS: seconds.get(RANKS, 0.0) + wait} if wait > 0 else {}
        found.append({**seconds, **moved})
    return found


def advice(seconds: dict[str, float], facts: Facts, callbacks: dict[str, float]) -> list[str]:
    """What to do about the parts that take a notable share, the largest first."""
    whole = max(sum(seconds.values()), 1e-9)
    shares = {part: spent / whole for part, spent in seconds.items()}
    lines = []
    for part in sorted(shares, key=lambda part: -shares[part]):
        if shares[part] < NOTABLE.get(part, 2.0):
            continue
        text = ADVICE.get(part, "")
        if part == DATA:
            text = facts.about_data
        elif part == OPTIMIZER and facts.may_fuse:
            text = UNFUSED + text
        elif part == CALLBACKS:
            longest = max(callbacks, key=lambda name: callbacks[name], default="")
            text = f"most of it in {longest}: let it act less often"
            saves = "Checkpoint" in longest or "Backup" in longest
            text += " (asynchronous=True saves beside the training)." if saves else "."
        lines.append(f"{shares[part]:.0%} {TITLES[part]}: {text}")
    if shares.get(FORWARD, 0.0) + shares.get(BACKWARD, 0.0) >= 0.8:
        lines.append(f"{shares[FORWARD] + shares[BACKWARD]:.0%} forward and backward: {IN_THE_NET}")
    return lines
