"""A profiler for the parts of an epoch."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fitkit import trees
from fitkit.accelerators import has_streams
from fitkit.arguments import check_count, check_flag
from fitkit.errors import ConfigurationError
from fitkit.extras.rate_callbacks import optimizers_of
from fitkit.seams.callbacks import Callback, Logs, from_all_ranks, print_on_rank_zero
from fitkit.seams.machines import overload
from fitkit.seams.networks import Module
from fitkit.seams.optimizers import FUSED, class_of

Hook = Callable[..., Any]
Hooks = dict[str, tuple[Hook, ...]]
PREFIX = "seconds/"

DATA, DEVICE, FORWARD, BACKWARD = "data", "to device", "forward", "backward"
OPTIMIZER, METRICS, CALLBACKS = "optimizer", "metrics", "callbacks"
RANKS, VALIDATION, REST = "ranks", "validation", "rest"


class Profiler(Callback):
    """Prints where an epoch's time went, and what to do about it.

    The parts are:

    - `"data"`: waiting for the next batch. Prefetching batches to a GPU counts here, too.
    - `"to device"`: from the start of the step until the net is called.
    - `"forward"`: the net, and what your own `training_step` does before it.
    - `"metrics"`: metrics, the loss and its own gradient, and logs.
    - `"backward"`: the backward pass, with gradient clipping.
    - `"optimizer"`, `"callbacks"`, `"validation"` and `"rest"`.
    - `"ranks"`: waiting for other ranks.

    Together they are the epoch's whole time. Code that `jit_compile` compiles is one piece, which
    counts as `"forward"`.

    On a GPU the times are the GPU's: data that are ready before it has finished cost nothing. The
    profiler waits for the GPU only at the end of the epoch. Without this callback, profiling costs
    nothing. With it, a step takes about 20 µs more.

    Args:
        every: print after every so many epochs. 0 never prints, for programs that read the
            attributes. Default 1.
        log: whether to add the seconds to the epoch's logs, as `seconds/data` and so on, and so to
            the history. They don't include callbacks that come after this one. Default False.

    Attributes:
        seconds: the last epoch's seconds by part, on this rank.
        wall_s: the last epoch's wall-clock seconds.
        ranks: the last epoch's seconds by part, for each rank. Gradients are exchanged within the
            backward pass. The time that a rank's backward pass takes beyond the shortest rank's
            counts as `"ranks"`.
        epochs: `seconds` of each epoch of the last fit.
        callbacks: the last epoch's seconds of each callback, by class.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

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
    each_batch = True  # within a group, nothing tells the data's time from the step's

    def __init__(self, every: int = 1, log: bool = False) -> None:
        every = check_count("every", every, minimum=0)
        log = check_flag("log", log)
        self.every = every
        self.log = log
        self.seconds: dict[str, float] = {}
        self.wall_s: float = 0.0
        self.ranks: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.callbacks: dict[str, float] = {}
        self._began_s = 0.0
        self._is_alone = True
        self._reset()

    def _reset(self) -> None:
        self._clock: PartClock | None = None
        self._handles: list[Any] = []
        self._has_own_step = False
        self._in_step = False
        self._depth = 0  # nesting depth of the modules that compute now
        self._is_before_net = False
        self._before_update = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_clock": None, "_handles": []}

    # ------------------------------------------------------------------ by callbacks' hooks

    def around_hooks(self, hooks: Hooks) -> Hooks:
        """Return the run's hooks, each timed, with this callback's own hooks at both ends."""
        if self.params.get("stage") != "fit":
            return hooks
        owners = [_owner(hook) for these in hooks.values() for hook in these]
        self._is_alone = all(o is self or not isinstance(o, Profiler) for o in owners)
        found = {
            name: tuple(hook if _owner(hook) is self else self._timed(hook) for hook in these)
            for name, these in hooks.items()
        }
        first: dict[str, Hook] = {
            "on_epoch_begin": self._begin_epoch,
            "on_train_batch_end": self._end_step,
            "on_test_begin": self._begin_validation,
            "on_epoch_end": self._end_batches,
        }
        last: dict[str, Hook] = {
            "on_epoch_begin": lambda *given: self._switch(DATA),
            "on_train_batch_begin": self._begin_step,
            "on_train_batch_end": lambda *given: self._switch(DATA),
            "on_test_end": lambda *given: self._switch(REST),
            "on_epoch_end": self._end_epoch,
        }
        found.update({name: (hook, *found[name]) for name, hook in first.items()})
        found.update({name: (*found[name], hook) for name, hook in last.items()})
        return found

    def _timed(self, hook: Hook) -> Hook:
        """Return a callback's hook. Its time counts for the callbacks."""
        owner = _owner(hook)
        name = getattr(hook, "__qualname__", "?") if owner is None else type(owner).__name__

        @functools.wraps(hook)
        def timed(*arguments: Any) -> Any:
            if self._clock is None:
                return hook(*arguments)
            before, began = self._switch(CALLBACKS), time.perf_counter()
            try:
                return hook(*arguments)
            finally:
                self._switch(before)
                passed = time.perf_counter() - began
                self.callbacks[name] = self.callbacks.get(name, 0.0) + passed

        return timed

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epochs = []
        self._reset()
        if not self._is_alone:
            raise ConfigurationError("fit was given two Profilers. One is enough; leave one out.")
        self.add_cleanup(self._close)
        device = self.model.device
        self._clock = GPUClock(device) if has_streams(device) else PartClock()
        self._has_own_step = type(self.model).training_step is not Module.training_step
        net = self.model.net
        # Steps of a model without a net may call its layers only.
        modules = [self.model, *self.model.children()] if net is None else [net]
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._before_forward),
                module.register_forward_hook(self._after_forward),
            ]
        for optimizer in optimizers_of(self.model):
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.log and self._clock is not None:
            self._take()
            logs.update({PREFIX + part: self.seconds.get(part, 0.0) for part in PARTS})

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._reset()

    def _switch(self, part: str) -> str:
        """Count the time from now on for `part`. Returns the part it counted for before."""
        return REST if self._clock is None else self._clock.switch(part)

    def _take(self) -> None:
        """Add the clock's times to the epoch's seconds."""
        assert self._clock is not None
        for part, seconds in self._clock.take().items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _begin_epoch(self, epoch: int, logs: Logs | None = None) -> None:
        self._take()  # to discard the time before this epoch
        self.seconds, self.callbacks = {}, {}
        self._began_s = time.perf_counter()

    def _begin_step(self, batch: int, logs: Logs | None = None) -> None:
        self._in_step, self._depth = True, 0
        self._is_before_net = not self._has_own_step
        self._switch(FORWARD)

    def _end_step(self, batch: int, logs: Logs) -> None:
        self._in_step = False
        self._switch(REST)

    def _end_batches(self, *given: Any) -> None:
        if self._clock is not None and self._clock.part == DATA:
            self._clock.part = METRICS  # no batch came: the epoch's values were computed
        self._switch(REST)

    def _begin_validation(self, logs: Logs | None = None) -> None:
        self._end_batches()
        self._switch(VALIDATION)

    def _end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        self._take()
        self.wall_s = time.perf_counter() - self._began_s
        self.epochs.append(self.seconds)
        self.ranks = with_waits(from_all_ranks(self.model, self.seconds))
        if self.every and (epoch + 1) % self.every == 0:
            epochs = self.params.get("epochs", epoch + 1)
            title = f"Epoch {epoch + 1}/{epochs} took {self.wall_s:,.3f} s:"
            text = table(
                title,
                self.ranks,
                self.callbacks,
                may_fuse=self._may_fuse(),
                may_name=self._may_name(),
            )
            busy = overload()
            print_on_rank_zero(self.model, text if busy is None else f"{text}\n-> {busy}")

    def _may_fuse(self) -> bool:
        """Whether an optimizer could update all weights in one kernel, but doesn't."""
        return any(
            class_of(optimizer) in FUSED and not all(g.get("fused") for g in optimizer.param_groups)
            for optimizer in optimizers_of(self.model)
        )

    def _may_name(self) -> bool:
        """Whether `compile` was given metrics that aren't names."""
        given = self.model._fitkit.compilation.given
        metrics = [*trees.leaves(given.metrics), *trees.leaves(given.weighted_metrics)]
        return any(not isinstance(metric, (str, type(None))) for metric in metrics)

    # ------------------------------------------------------------------ by torch's hooks
    # torch.compile skips these when it traces: they must leave nothing in its graph.

    def _before_forward(self, module: Any, given: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_step_here():
            return
        self._depth += 1
        if self._depth == 1:
            if self._is_before_net and self._clock is not None:
                self._clock.part = DEVICE  # the time since the batch began
                self._is_before_net = False
            self._switch(FORWARD)

    def _after_forward(self, module: Any, given: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._in_step:
            return
        output = dict(output) if trees.has_items(output) else output
        for leaf in trees.leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._begin_backward)
        if self._is_step_here():
            self._depth -= 1
            if self._depth == 0:
                self._switch(METRICS)

    def _is_step_here(self) -> bool:
        """Whether a step runs in this thread. Replicas compute in others."""
        clock = self._clock
        return self._in_step and clock is not None and clock.thread == threading.get_ident()

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        # torch computes a GPU's gradients in another thread, for which the step's thread waits.
        clock = self._clock
        if self._in_step and clock is not None and clock.part in (FORWARD, METRICS):
            clock.switch(BACKWARD)

    def _before_step(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before_update = self._switch(OPTIMIZER)

    def _after_step(self, *given: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._in_step:  # an update at the epoch's end, from the remaining batches
            self._switch(self._before_update)
        else:
            self._switch(FORWARD if self._has_own_step else REST)


def _owner(hook: Hook) -> Any:
    """Return the callback that a hook belongs to; None for a plain function."""
    return getattr(hook, "__self__", None)


LONGEST_QUEUE = 512
"""CUDA events that may wait to be read. With more, those that are complete are read."""


class PartClock:
    """Counts seconds by part of the work, by the host's clock.

    Attributes:
        part: the part that the time counts for now, since the last `switch`.
        thread: the thread that created the clock.
    """

    def __init__(self) -> None:
        self.thread: int = threading.get_ident()
        self.part: str = REST
        self._seconds: dict[str, float] = {}
        self._since: Any = self._now()

    def switch(self, part: str) -> str:
        """Count the time from now on for `part`. Returns the part it counted for before."""
        before, self.part = self.part, part
        self._mark(before)
        return before

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call. On a GPU this waits for it."""
        self.switch(self.part)
        found, self._seconds = self._seconds, {}
        return found

    def _now(self) -> Any:
        return time.perf_counter()

    def _mark(self, part: str) -> None:
        """Count the time since the last mark for `part`."""
        now = self._now()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now


class GPUClock(PartClock):
    """Counts a GPU's time: its marks are events, which it reaches in its own time.

    Nothing waits for it. GPU work during the host's wait for data counts as work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []
        self._queue: deque[tuple[str, Any]] = deque()  # parts, and the events that end them
        super().__init__()

    def take(self) -> dict[str, float]:
        self.switch(self.part)
        self._queue[-1][1].synchronize()
        while self._queue:
            self._read()
        found, self._seconds = self._seconds, {}
        return found

    def _now(self) -> Any:
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _mark(self, part: str) -> None:
        self._queue.append((part, self._now()))
        if len(self._queue) > LONGEST_QUEUE:
            while len(self._queue) > 1 and self._queue[0][1].query():
                self._read()

    def _read(self) -> None:
        """Take the oldest event from the queue."""
        part, event = self._queue.popleft()
        passed = self._since.elapsed_time(event) / 1e3
        self._seconds[part] = self._seconds.get(part, 0.0) + passed
        self._free.append(self._since)
        self._since = event


class Part(NamedTuple):
    """A part of an epoch, as the table shows it.

    Attributes:
        title: its name in the table.
        notable: the share of the time above which it gets advice.
        advice: what to do about it.
    """

    title: str
    notable: float = math.inf
    advice: str = ""


PARTS = {
    DATA: Part(
        "waiting for data",
        0.2,
        "give the DataLoader num_workers=4 (or more) and persistent_workers=True, or give fit the "
        "arrays themselves if they fit in memory; if it has them already, take larger batches.",
    ),
    DEVICE: Part(
        "host to device",
        0.1,
        "give the DataLoader pin_memory=True, and x in the dtype that the net takes.",
    ),
    FORWARD: Part("forward"),
    BACKWARD: Part("backward"),
    OPTIMIZER: Part(
        "optimizer", 0.3, "larger batches or accumulate_grad_batches make fewer updates."
    ),
    METRICS: Part(
        "loss and metrics",
        0.15,
        "give metrics that only the validation needs to evaluate().",
    ),
    CALLBACKS: Part("callbacks", 0.1),
    RANKS: Part(
        "waiting for ranks",
        0.15,
        "some ranks have more work or slower data than others: see their columns; larger batches "
        "or accumulate_grad_batches make fewer exchanges.",
    ),
    VALIDATION: Part(
        "validation",
        0.4,
        "validate less often (validation_freq=5), on fewer batches (validation_steps), or in "
        "larger ones (validation_batch_size).",
    ),
    REST: Part(
        "the rest",
        0.25,
        "the steps are so short that the loop's own time shows: use larger batches.",
    ),
}
"""The parts in the order of the table."""

IN_THE_NET = (
    "the net itself takes the time: larger batches, precision='bf16-mixed' or jit_compile=True on "
    "a GPU, more devices."
)
UNFUSED = "name the optimizer in compile (optimizer='adam'), or give yours fused=True; "
UNNAMED = "metrics by name (metrics=['accuracy']) cost less than objects; "


def table(
    title: str,
    ranks: Sequence[dict[str, float]],
    callbacks: dict[str, float],
    *,
    may_fuse: bool = False,
    may_name: bool = False,
) -> str:
    """Return an epoch as text: rank 0's seconds by part, beside those of the slowest rank.

    Args:
        title: the first line.
        ranks: seconds by part, for each rank.
        callbacks: rank 0's seconds of each callback, by class.
        may_fuse: whether an optimizer could update all weights in one kernel, but doesn't.
        may_name: whether metrics are objects, not names.
    """
    slowest = slowest_of(ranks)
    shown = sorted({0, slowest})
    lines = [title]
    if len(ranks) > 1:
        heads = [f"rank {rank}" + " (the slowest)" * (rank == slowest) for rank in shown]
        lines.append(" " * 18 + "".join(f"{head:>24}" for head in heads))
    for part, (name, _, _) in PARTS.items():
        if any(part in seconds for seconds in ranks):
            lines.append(f"{name:18}" + "".join(_cell(ranks[rank], part) for rank in shown))
    said = advice(ranks[0], callbacks, may_fuse=may_fuse, may_name=may_name)
    lines += [f"-> {line}" for line in said]
    return "\n".join(lines)


def _cell(seconds: dict[str, float], part: str) -> str:
    """Return a part's seconds and its share of the whole."""
    spent = seconds.get(part, 0.0)
    return f"{spent:12,.3f} s {spent / max(sum(seconds.values()), 1e-9):9.1%}"


def slowest_of(ranks: Sequence[dict[str, float]]) -> int:
    """Return the rank that waited least for the others."""
    return min(range(len(ranks)), key=lambda rank: ranks[rank].get(RANKS, 0.0))


def with_waits(ranks: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the ranks' seconds, with the waits inside their backward passes counted as waits.

    Gradients are exchanged within the backward pass: a rank that is early waits in it for the last
    one. The time beyond the shortest rank's is counted as that wait.
    """
    shortest = min(seconds.get(BACKWARD, 0.0) for seconds in ranks)
    found = []
    for seconds in ranks:
        wait = seconds.get(BACKWARD, 0.0) - shortest
        moved = {BACKWARD: shortest, RANKS: seconds.get(RANKS, 0.0) + wait} if wait > 0 else {}
        found.append({**seconds, **moved})
    return found


def advice(
    seconds: dict[str, float],
    callbacks: dict[str, float],
    *,
    may_fuse: bool = False,
    may_name: bool = False,
) -> list[str]:
    """Say what to do about the parts that take a notable share, the largest first."""
    whole = max(sum(seconds.values()), 1e-9)
    shares = {part: spent / whole for part, spent in seconds.items()}
    lines = []
    for part in sorted(shares, key=lambda part: -shares[part]):
        title, notable, text = PARTS[part]
        if shares[part] < notable:
            continue
        if part == OPTIMIZER and may_fuse:
            text = UNFUSED + text
        elif part == METRICS and may_name:
            text = UNNAMED + text
        elif part == CALLBACKS:
            longest = max(callbacks, key=lambda name: callbacks[name], default="")
            text = f"most of it in {longest}: run it less often"
            saves = "Checkpoint" in longest or "Backup" in longest
            text += " (asynchronous=True saves beside the training)." if saves else "."
        lines.append(f"{shares[part]:.0%} {title}: {text}")
    computes = shares.get(FORWARD, 0.0) + shares.get(BACKWARD, 0.0)
    if computes >= 0.8:
        lines.append(f"{computes:.0%} forward and backward: {IN_THE_NET}")
    return lines
