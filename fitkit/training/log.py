"""The values of a pass: running means, what steps log, and the values over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from fitkit.accelerators import widest_dtype
from fitkit.arguments import describe
from fitkit.distributed.collectives import Collectives
from fitkit.errors import CheckpointError, ConfigurationError, FitkitError, warn
from fitkit.losses import Term
from fitkit.losses.compiled import of_outputs
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.metrics.torchmetrics_adapter import merged_metric_value, metric_states
from fitkit.module import LogOptions, merged
from fitkit.outputs import EMPTY_MEAN
from fitkit.samples import Doubts
from fitkit.scopes import Scope
from fitkit.shortcuts import Shortcut

FOLD_EVERY = 128
"""The most values kept before they are added to a sum: bounds memory, costs one operation."""


READ_AT_ONCE = Shortcut("values on a CPU read at once")


class RunningMean:
    """The mean of batch values, each weighted by what it is the mean over, in `widest_dtype`.

    On a GPU, adding only keeps the tensor. The sums are made there every `FOLD_EVERY` values. A
    CPU's values are read at once, because nothing waits for that. Kept small tensors would lie in
    the gaps where a net's next activations would be. These would then move through memory that no
    cache holds (9 % of a small net's time).
    """

    __slots__ = ("_count", "_counted", "_counts", "_read", "_sum", "_values", "last", "last_count")

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None
        self.last_count: float | torch.Tensor = 0
        self._values: list[torch.Tensor] = []
        self._counts: list[float | torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._read = 0.0
        self._count: float = 0
        self._counted: float | torch.Tensor = 0  # on the device

    def add(self, value: torch.Tensor, count: float | torch.Tensor) -> None:
        """Add a batch's mean. A mean over nothing changes nothing, though it is NaN.

        Args:
            value: a detached tensor ().
            count: what it is the mean over: samples, or a tensor () on the device.
        """
        self.last, self.last_count = value, count
        if is_at_hand(value) and READ_AT_ONCE.is_on:
            if isinstance(count, torch.Tensor):
                count = count.item()
            if count:
                self._read += value.item() * count
                self._count += count
            return
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) >= FOLD_EVERY:
            self._fold()

    def add_each(self, values: torch.Tensor, count: int) -> None:
        """Add several batches' means (k,), each over this many samples."""
        if not (is_at_hand(values) and READ_AT_ONCE.is_on):
            for value in values.unbind():
                self.add(value, count)
            return
        self.last, self.last_count = values[-1], count
        for number in values.tolist():
            self._read += number * count
            self._count += count

    def _fold(self) -> None:
        device = self._values[0].device
        dtype = widest_dtype(device)
        values = torch.stack([value.to(device) for value in self._values]).to(dtype)
        if any(isinstance(count, torch.Tensor) for count in self._counts):
            each = [torch.as_tensor(count, device=device) for count in self._counts]
            counts = torch.stack([count.to(dtype) for count in each])
            self._counted = self._counted + counts.sum()
        else:
            counts = torch.tensor(self._counts, dtype=dtype)
            self._count += sum(map(float, self._counts))
        counts = counts.to(device, non_blocking=True)  # a GPU isn't waited for
        total = torch.where(counts > 0, values, 0.0) @ counts
        self._sum = total if self._sum is None else self._sum + total
        self._values.clear()
        self._counts.clear()

    def sums(self) -> tuple[float, float]:
        """Return the sum over what counted so far, read from the device, and its count."""
        if self._values:
            self._fold()
        total = self._read + (0.0 if self._sum is None else self._sum.item())
        counted = self._counted
        return total, self._count + (
            counted.item() if isinstance(counted, torch.Tensor) else counted
        )

    def result(self) -> float | None:
        """Return the mean so far, read from the device; None before the first value.

        `EMPTY_MEAN` if nothing counted.
        """
        total, count = self.sums()
        if count:
            return total / count
        return None if self.last is None else EMPTY_MEAN


def is_at_hand(value: torch.Tensor) -> bool:
    """Whether a number can be read without waiting: it is in main memory, on this rank."""
    return value.is_cpu and type(value) is torch.Tensor


class Running:
    """A value over a pass: the mean over samples, or the sum, least or largest of all values.

    Args:
        reduce_fx: one of `REDUCTIONS`.
    """

    def __init__(self, reduce_fx: str) -> None:
        self._reduce_fx = reduce_fx
        self._mean = RunningMean()
        self._value: torch.Tensor | None = None

    def add(self, value: torch.Tensor, samples: int) -> None:
        """Add a value, a detached 0-d tensor."""
        if self._reduce_fx == "mean":
            self._mean.add(value, samples)
            return
        value = value.to(widest_dtype(value.device))
        pair = _PAIRWISE[self._reduce_fx]
        self._value = value if self._value is None else pair(self._value, value)

    def state(self) -> tuple[float, float]:
        """Return this rank's state, as (number, samples). No samples: nothing."""
        if self._reduce_fx == "mean":
            return self._mean.sums()
        return (0.0, 0) if self._value is None else (self._value.item(), 1)


_PAIRWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Entry:
    """All values logged under one name.

    Attributes:
        options: the options of `self.log`, the same at each call.
        latest: the last value.
        own: the same with `sync_dist`, as (number, samples) of this rank; None if the ranks have
            exchanged it.
        running: the values of the pass.
        metric: the torchmetrics object, if it is one.
    """

    def __init__(self, options: LogOptions) -> None:
        self.options = options
        self.latest: torch.Tensor | float | None = None
        self.own: tuple[float, float] | None = None
        self.running: Running = Running(options.reduce_fx)
        self.metric: Any = None

    def values(self, name: str) -> dict[str, float]:
        """Return the values so far, on this rank."""
        step, epoch = self.options.names(name)
        found: dict[str, float | None] = {}
        if self.metric is not None:
            if self.options.on_epoch:
                own = metric_states(self.metric)  # on this rank, without the metric's own exchange
                found[epoch] = _number(merged_metric_value(self.metric, [own]))
        elif self.options.on_epoch:
            found[epoch] = merged(self.options.reduce_fx, [self.running.state()])
        if self.options.on_step and self.latest is not None:
            found[step] = float(self.latest)
        return {key: value for key, value in found.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """Return what this rank sends to the others."""
        latest = None if self.latest is None else float(self.latest)
        return {
            "options": dataclasses.asdict(self.options),
            "running": self.running.state(),
            "latest": latest,
            "own": self.own,
            "metric": None if self.metric is None else metric_states(self.metric),
        }


class Logged:
    """The names and values of one pass.

    A torchmetrics object of the user's has a pass's sums in the user's memory. So where it is first
    logged, its reset is pushed on a scope. That ends when the pass's values are taken, or with an
    error.

    Args:
        scope: the pass's.

    Attributes:
        entries: the entries by name, in the order in which they came.
    """

    def __init__(self, scope: Scope) -> None:
        self.entries: dict[str, Entry] = {}
        self._scope = scope
        self._lent: Scope | None = None  # ends with the scope, or before
        self._synced: tuple[str, ...] | None = None
        self._pending: set[str] = set()  # what the ranks exchange at this step's end

    def add(
        self, name: str, value: Any, options: LogOptions, samples: int, in_step: bool = False
    ) -> None:
        """Add a value.

        Args:
            value: a 0-d tensor, or a torchmetrics object.
            samples: the number of samples that weights it in a mean.
            in_step: whether a step logs it, at whose end the ranks `exchange`. What hooks log is
                exchanged at the end of the pass.

        Raises:
            ConfigurationError: the name came before with other options, or with another metric.
        """
        entry = self.entries.get(name)
        metric = None if isinstance(value, torch.Tensor) else value
        if entry is None:
            entry = self.entries[name] = Entry(options)
            if metric is not None:
                entry.metric = metric
                if self._lent is None:
                    self._lent = self._scope.enter_context(Scope())
                self._lent.callback(metric.reset)
        elif entry.options != options:
            raise ConfigurationError(
                f"self.log({name!r}) was called with other arguments before: {entry.options}, now "
                f"{options}. Use the same arguments in every call, or choose another name."
            )
        elif entry.metric is not metric:
            raise ConfigurationError(
                f"self.log({name!r}) got another torchmetrics object than before, or sometimes a "
                "metric and sometimes a number. The epoch's value would lack the earlier batches. "
                "Create the metric once, in __init__, and log that object in each step."
            )
        if metric is not None:
            latest = getattr(metric, "_forward_cache", None)  # the batch's, if it was called
            entry.latest = latest.detach() if isinstance(latest, torch.Tensor) else latest
            return
        entry.latest = value
        if options.on_epoch:
            entry.running.add(value, samples)
        if options.sync_dist and options.on_step:
            weight = samples if options.reduce_fx == "mean" else 1
            entry.own = value.item() * weight, samples
            if in_step:
                self._pending.add(name)

    def exchange(self, collectives: Collectives, *, is_padding: bool = False) -> None:
        """Make the last step's values with `sync_dist` those of all ranks.

        Ranks:
            Collective, if such a name was logged on any rank in the pass's first step.

        Raises:
            ConfigurationError: ranks logged different names.
        """
        if collectives.world_size == 1:
            return
        pending: dict[str, Any] = {name: self.entries[name].own for name in sorted(self._pending)}
        self._pending.clear()
        if self._synced is None:
            everyone = collectives.gather(None if is_padding else tuple(pending))
            gathered = [names for names in everyone if names is not None]
            check_names(gathered)
            self._synced = gathered[0]
        if any(name not in self._synced for name in pending):
            raise ConfigurationError(
                f"self.log({next(iter(pending))!r}, sync_dist=True, on_step=True) was first "
                "called in a later step. Call it from the first step on, on every rank."
            )
        if not self._synced:
            return
        steps = collectives.gather(pending)
        for name in self._synced:
            entry = self.entries.get(name)
            states = [step[name] for step in steps if name in step]
            if entry is not None and states:
                entry.latest, entry.own = merged(entry.options.reduce_fx, states), None

    def results(self) -> dict[str, float]:
        """All values so far, on this rank."""
        return {
            key: value
            for name, entry in self.entries.items()
            for key, value in entry.values(name).items()
        }

    def state(self) -> dict[str, Any]:
        """Return what this rank sends to the others, by name."""
        return {name: entry.state() for name, entry in self.entries.items()}

    @property
    def has_metrics(self) -> bool:
        """Whether a value is a torchmetrics object."""
        return any(entry.metric is not None for entry in self.entries.values())

    def give_back(self) -> None:
        """Give the user's objects back as they were, because the pass's values are taken."""
        if self._lent is not None:
            self._lent.close()

    def merge(
        self, gathered: list[dict[str, Any]], steps: list[int], ranks: list[int]
    ) -> dict[str, float]:
        """Return the values of all ranks together, as far as this rank can compute them.

        Args:
            gathered: each rank's `state`.
            steps: each rank's number of steps that count. A rank without any logs nothing.
            ranks: the rank of each state. A rank may have several.

        Raises:
            ConfigurationError: ranks logged different names with `sync_dist`.
        """
        synced = [
            tuple(name for name, state in states.items() if state["options"]["sync_dist"])
            for states, count in zip(gathered, steps, strict=True)
            if count
        ]
        check_names(synced)
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for states in gathered for name in states):
            held = [states[name] for states in gathered if name in states]
            pairs = zip(ranks, gathered, strict=True)
            first = [s[name] for rank, s in pairs if rank == 0 and name in s] or held[:1]
            options = LogOptions(**held[0]["options"])
            step, epoch = options.names(name)
            if held[0]["metric"] is not None:
                entry = self.entries.get(name)
                if options.on_step and held[0]["latest"] is not None:
                    found[step] = held[0]["latest"]
                if entry is not None and options.on_epoch:
                    found[epoch] = _number(
                        merged_metric_value(entry.metric, [state["metric"] for state in held])
                    )
                continue
            if options.on_epoch:
                counted = first if options.rank_zero_only else held
                value = merged(options.reduce_fx, [state["running"] for state in counted])
                if value is not None:
                    found[epoch] = value
            if options.on_step:
                counted = first if options.rank_zero_only else held
                owns = [state["own"] for state in counted if state.get("own") is not None]
                value = merged(options.reduce_fx, owns)
                found[step] = first[-1]["latest"] if value is None else value
        return found


def check_names(gathered: list[tuple[str, ...]]) -> None:
    """Refuse ranks that logged different names with `sync_dist=True`.

    Raises:
        ConfigurationError: with the names, by rank.
    """
    everywhere = set.intersection(*map(set, gathered)) if gathered else set()
    odd = {name for names in gathered for name in names if name not in everywhere}
    if not odd:
        return
    by_rank = "; ".join(
        f"{name!r} on rank "
        + ", ".join(str(rank) for rank, names in enumerate(gathered) if name in names)
        for name in sorted(odd)
    )
    raise ConfigurationError(
        f"The {len(gathered)} ranks logged different names with sync_dist=True: {by_rank} only. "
        "Log the same names on every rank, or give rank_zero_only=True."
    )


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    raise ConfigurationError(
        f"self.log got a torchmetrics object that computes {describe(value)}, not one number. "
        "Compute it at the end of the epoch, and log its parts."
    )


class Logbook:
    """The loss, its parts, the metrics and the logged values of one pass, by name and in order.

    It is made for the pass, and thrown away with it.

    Args:
        meters: the metrics. Their objects are lent to one pass at a time.
        scope: the pass's, with the hooks at its end.
        doubts: as the attribute.

    Attributes:
        scales: the loss weights of the parts, if these are means over different things. The loss
            is then their sum, not a mean of batches' losses.
        steps: how many steps this rank has made, without batches that have no rows.
        padding: how many of a model's own steps were padding, which doesn't count.
        samples: this rank's samples in the last batch; 0 for padding.
        seen: the samples of a model's own steps so far, on this rank.
        doubts: say once that batches' entries disagree on their samples.
        outputs: what the steps returned; None where nobody wants it.
        joined: what all ranks have noted of the pass, as `noted_by` returns it, if `reduced` has
            joined it. What a rank notes is no longer its own then.
    """

    def __init__(
        self,
        meters: CompiledMetrics,
        scope: Scope,
        doubts: Doubts | None = None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        if meters:
            scope.callback(meters.reset)
        self.loss: RunningMean = RunningMean()
        self.parts: dict[str, RunningMean] = {}
        self.scales: dict[str, float] = {}
        self.meters = meters
        self.logged: Logged = Logged(scope)
        self.steps: int = 0
        self.padding: int = 0
        self.samples: int = 0
        self.seen: int = 0
        self.doubts: Doubts = doubts or Doubts()
        self.outputs: list[Any] | None = [] if keeps_outputs else None
        self.joined: list[dict[str, Any]] = []

    def add_losses(
        self,
        loss: torch.Tensor,
        count: float | torch.Tensor | None,
        terms: Sequence[Term],
        samples: int,
    ) -> None:
        """Add a batch's loss, and the losses of its several outputs.

        Args:
            count: what the loss is the mean over; None for the batch's samples.
        """
        if any(term.count is not None for term in terms):
            self.loss.last, self.loss.last_count = loss.detach(), samples
            self.scales.update((term.name, term.scale) for term in terms)
        else:
            self.loss.add(loss.detach(), samples if count is None else count)
        if terms:
            self.add_terms(terms, samples)

    def add_terms(self, terms: Sequence[Term], samples: int) -> None:
        """Add the losses of a batch's several outputs, each the mean over its own count."""
        for term in terms:
            mean = self.parts.setdefault(term.name, RunningMean())
            mean.add(term.value.detach(), samples if term.count is None else term.count)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum of the loss and of each of its parts, with what it was taken over."""
        parts = {name: part.sums() for name, part in self.parts.items() if part.last is not None}
        if self.scales or not self._has_loss:
            return parts
        return {"loss": self._loss_sums(), **parts}

    @property
    def _has_loss(self) -> bool:
        return self.loss.last is not None or self.meters.loss_sums()[1] > 0

    def _loss_sums(self) -> tuple[float, float]:
        """Return the sum of the losses and their number, including those that wait with the
        metrics.
        """
        (total, count), (more, samples) = self.loss.sums(), self.meters.loss_sums()
        return total + more, count + samples

    def results(self) -> dict[str, Any]:
        """All running values as Python floats: the loss, its parts, the metrics, the logged."""
        with self.meters.up_to_date():
            total, count = self._loss_sums()
            mean = total / count if count else self.loss.result()
            found: dict[str, Any] = {"loss": mean}
            if self.parts:
                parts = {name: part.result() for name, part in self.parts.items()}
                found["loss"] = whole_loss(parts, self.scales, found["loss"])
                found.update(of_outputs(parts))
            found = {name: value for name, value in found.items() if value is not None}
            if self.meters:
                found.update(self.meters.results())
            if self.logged.entries:
                found.update(self.logged.results())
            return found


def whole_loss(
    parts: Mapping[str, float | None], scales: dict[str, float], loss: float | None
) -> float | None:
    """Return the loss of several outputs, from their means, if these are over different things."""
    means = [(scale, parts.get(name)) for name, scale in scales.items()]
    if any(mean is EMPTY_MEAN for _, mean in means):
        return EMPTY_MEAN
    known = [scale * mean for scale, mean in means if mean is not None]
    return sum(known) if known else loss


class LazyLogs(MutableMapping[str, Any]):
    """A batch's logs: running values, computed when they are read.

    Args:
        read: a function that returns the values, called at the first access.
        batch_loss: the batch's own loss, a 0-d tensor on the device; None if there is none.
        batch_count: what it is the mean over.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        batch_loss: torch.Tensor | None = None,
        batch_count: float | torch.Tensor = 0,
    ) -> None:
        self._read = read
        self.batch_loss = batch_loss
        self.batch_count = batch_count
        self._values: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._values is None:
            self._values = self._read()
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._all()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def reduced(
    logbook: Logbook, collectives: Collectives, carried: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], int]:
    """Return the logbook's values over the samples of all ranks, the same on each of them.

    Sums and counts travel, never means: each sample counts once, on whichever rank. A name
    that a rank doesn't have counts no samples there.

    Args:
        carried: what was noted of this pass before it was cut, the same on every rank.

    Returns:
        The values by name, and the number of steps of all ranks.

    Raises:
        ConfigurationError: ranks logged different names with `sync_dist`.

    Ranks:
        Collective: one exchange; a second where a rank saw no batch at all.
    """
    if collectives.world_size == 1 and not carried and not logbook.logged.has_metrics:
        return logbook.results(), logbook.steps
    gathered = logbook.joined = [
        *(carried or ()),
        *collectives.gather(
            {**noted_by(logbook, collectives.rank), "doubt": logbook.doubts.sentence}
        ),
    ]
    for one in gathered:
        if one.get("doubt") is not None:
            logbook.doubts.note(one["doubt"], speaks=collectives.rank == 0)
    try:
        values = _merged(logbook, collectives, gathered)
        logbook.logged.give_back()
        return values
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if not carried or isinstance(error, FitkitError):
            raise
        raise CheckpointError(
            "The epoch's values in the checkpoint don't match those of the resumed epoch "
            f"({type(error).__name__}: {error}). Restart the epoch from its weights "
            "(load_weights), or use an earlier checkpoint."
        ) from error


def _merged(
    logbook: Logbook, collectives: Collectives, gathered: list[dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """Return the values and the number of steps, from what each rank has noted."""
    values = _means([one["sums"] for one in gathered])
    scales = {name: scale for one in gathered for name, scale in one.get("scales", {}).items()}
    loss = whole_loss(values, scales, values.get("loss"))
    values.pop("loss", None)
    values = {**({} if loss is None else {"loss": loss}), **of_outputs(values)}
    metrics: dict[str, Any] = {}
    states = [one["metrics"] for one in gathered if one["metrics"] is not None]
    if logbook.meters.state() is not None:
        logbook.meters.merge(states)
        metrics = logbook.meters.results()
    all_logged = [one["logged"] for one in gathered]
    logged = logbook.logged.merge(
        all_logged,
        [one["steps"] - one.get("padding", 0) for one in gathered],
        [one.get("rank", 0) for one in gathered],
    )
    if len(states) not in (0, len(gathered)) or _lacks_metrics(all_logged):
        # A rank without batches never learned which metrics there are.
        everyone = collectives.gather((metrics, logged))
        # A rank's own, if it has them: sent, `EMPTY_MEAN` is a NaN like any other.
        metrics = metrics or next((found for found, _ in everyone if found), {})
        logged = max((found for _, found in everyone), key=len)
    counted = {
        LogOptions(**state["options"]).names(name)[1]
        for states in all_logged
        for name, state in states.items()
        if state["metric"] is not None and state["options"]["on_epoch"]
    }
    if (lost := counted - logged.keys()) and collectives.rank == 0:
        warn(
            f"The epoch's logs lack {', '.join(sorted(lost))}. The checkpoint was saved after the "
            "epoch's last batch, so no batch logs the torchmetrics object again. Log a tensor, or "
            "save at the end of the epoch."
        )
    return {**values, **metrics, **logged}, sum(one["steps"] for one in gathered)


def warn_of_empty(values: Mapping[str, Any], when: str) -> bool:
    """Warn of means over nothing.

    Args:
        values: a pass's values.
        when: the beginning of the sentence: "In epoch 1".

    Returns:
        Whether there are any.
    """
    names = [name for name, value in values.items() if value is EMPTY_MEAN]
    if names:
        warn(
            f"{when} nothing counts for {', '.join(names)}: all labels are ignored, all weights "
            "are 0, or what a metric compares is missing (samples of several classes, numbers that "
            "differ). Then the value is nan. Look at the labels and weights of these data."
        )
    return bool(names)


def noted_by(logbook: Logbook, rank: int) -> dict[str, Any]:
    """Return what this rank has noted of a pass, as plain data."""
    with logbook.meters.up_to_date():  # the waiting batches are counted once
        return {
            "sums": logbook.sums(),
            "scales": dict(logbook.scales),
            "metrics": logbook.meters.state(),
            "logged": logbook.logged.state(),
            "steps": logbook.steps,
            "padding": logbook.padding,
            "rank": rank,
        }


def _means(all_sums: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return the ranks' sums by name, divided by their counts: never a mean of means."""
    means = {}
    for name in dict.fromkeys(name for sums in all_sums for name in sums):
        pairs = [sums[name] for sums in all_sums if name in sums]
        count = sum(count for _, count in pairs)
        means[name] = sum(total for total, _ in pairs) / count if count else EMPTY_MEAN
    return means


def _lacks_metrics(all_logged: list[dict[str, Any]]) -> bool:
    """Whether some rank logged no torchmetrics object where another did."""
    kinds = [{name for name, state in one.items() if state["metric"]} for one in all_logged]
    return any(kind != kinds[0] for kind in kinds)
