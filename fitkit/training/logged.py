"""What the steps of one pass log by `self.log`: running values by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError
from fitkit.logging_options import LogOptions, merged
from fitkit.metrics.merging import merged_metric_value, metric_states
from fitkit.training.running_mean import RunningMean


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
        """Take a value; `value` is a detached 0-d tensor."""
        if self._reduce_fx == "mean":
            self._mean.add(value, samples)
        elif self._value is None:
            self._value = value.double()
        else:
            self._value = _PAIRWISE[self._reduce_fx](self._value, value.double())

    def state(self) -> tuple[float, float]:
        """What there is on this rank, as (number, samples); no samples: nothing."""
        if self._reduce_fx == "mean":
            return self._mean.sums()
        return (0.0, 0) if self._value is None else (self._value.item(), 1)


_PAIRWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Entry:
    """All that was logged under one name.

    Attributes:
        options: what `self.log` was told; the same at each call.
        latest: the last value.
        running: the values of the pass.
        metric: the torchmetrics object, where it is one.
    """

    def __init__(self, options: LogOptions) -> None:
        self.options = options
        self.latest: torch.Tensor | float | None = None
        self.running = Running(options.reduce_fx)
        self.metric: Any = None

    def values(self, name: str) -> dict[str, float]:
        """The values so far, on this rank."""
        step, epoch = self.options.names(name)
        found: dict[str, float | None] = {}
        if self.metric is not None:
            if self.options.on_epoch:
                found[epoch] = _number(local_value(self.metric))
        elif self.options.on_epoch:
            found[epoch] = merged(self.options.reduce_fx, [self.running.state()])
        if self.options.on_step and self.latest is not None:
            found[step] = float(self.latest)
        return {key: value for key, value in found.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """What this rank tells the others."""
        latest = None if self.latest is None else float(self.latest)
        return {
            "options": dataclasses.asdict(self.options),
            "running": self.running.state(),
            "latest": latest,
            "metric": None if self.metric is None else metric_states(self.metric),
        }


class Logged:
    """The names and values of one pass.

    Attributes:
        entries: by name, in the order in which they came.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._synced: tuple[str, ...] | None = None
        self._pending: dict[str, tuple[float, float]] = {}

    def reset(self) -> None:
        """Begin a new pass."""
        self.finish()
        self.entries.clear()
        self._pending.clear()

    def add(self, name: str, value: Any, options: LogOptions, samples: int) -> None:
        """Take a value.

        Args:
            value: a 0-d tensor, or a torchmetrics object.
            samples: by how many samples a mean weighs it.

        Raises:
            ConfigurationError: the name came before with other options, or with another metric.
        """
        entry = self.entries.get(name)
        metric = None if isinstance(value, torch.Tensor) else value
        if entry is None:
            entry = self.entries[name] = Entry(options)
        elif entry.options != options:
            raise ConfigurationError(
                f"self.log({name!r}) came with other arguments before: {entry.options} and now "
                f"{options}. Log one name in one way, or choose another name."
            )
        elif entry.metric is not metric:
            raise ConfigurationError(
                f"self.log({name!r}) got another torchmetrics object than before, or a metric and "
                "a number by turns: an epoch's value would lack all that came before. Make the "
                "metric once, in __init__, and log that object in each step."
            )
        if metric is not None:
            entry.metric = metric
            entry.latest = getattr(metric, "_forward_cache", None)  # the batch's, if it was called
            return
        entry.latest = value
        if options.on_epoch:
            entry.running.add(value, samples)
        if options.sync_dist and options.on_step:
            weight = samples if options.reduce_fx == "mean" else 1
            self._pending[name] = (value.item() * weight, samples)

    def exchange(self, collectives: Collectives, *, is_filler: bool = False) -> None:
        """Make the last step's values with `sync_dist` those of all ranks.

        Ranks:
            Collective, if such a name was logged on any rank in the pass's first step.

        Raises:
            ConfigurationError: ranks logged different names.
        """
        if collectives.world_size == 1:
            return
        pending, self._pending = self._pending, {}
        if self._synced is None:
            everyone = collectives.gather(None if is_filler else tuple(pending))
            told = [names for names in everyone if names is not None]
            check_names(told)
            self._synced = told[0]
        if any(name not in self._synced for name in pending):
            raise ConfigurationError(
                f"self.log({next(iter(pending))!r}, sync_dist=True, on_step=True) came first in a "
                "later step. Log it from the first step on, on every rank."
            )
        if not self._synced:
            return
        steps = collectives.gather(pending)
        for name in self._synced:
            entry = self.entries.get(name)
            states = [step[name] for step in steps if name in step]
            if entry is not None and states:
                entry.latest = merged(entry.options.reduce_fx, states)

    @property
    def hidden(self) -> set[str]:
        """The names that the progress bar doesn't show."""
        return {
            key
            for name, entry in self.entries.items()
            if not entry.options.prog_bar
            for key in entry.options.names(name)
        }

    def results(self) -> dict[str, float]:
        """All values so far, on this rank."""
        return {
            key: value
            for name, entry in self.entries.items()
            for key, value in entry.values(name).items()
        }

    def state(self) -> dict[str, Any]:
        """What this rank tells the others, by name."""
        return {name: entry.state() for name, entry in self.entries.items()}

    def finish(self) -> None:
        """Let torchmetrics objects forget the pass: its values are taken."""
        for entry in self.entries.values():
            if entry.metric is not None:
                entry.metric.reset()

    def merge(
        self, told: list[dict[str, Any]], steps: list[int], ranks: list[int]
    ) -> dict[str, float]:
        """The values of all ranks together, as far as this rank can tell them.

        Args:
            told: each rank's `state`.
            steps: each rank's number of steps that count; one without any logs nothing.
            ranks: whose state each one is; a rank may have several.

        Raises:
            ConfigurationError: ranks logged different names with `sync_dist`.
        """
        synced = [
            tuple(name for name, state in states.items() if state["options"]["sync_dist"])
            for states, count in zip(told, steps, strict=True)
            if count
        ]
        check_names(synced)
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for states in told for name in states):
            held = [states[name] for states in told if name in states]
            pairs = zip(ranks, told, strict=True)
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
                found[step] = first[-1]["latest"]
        return found


def check_names(told: list[tuple[str, ...]]) -> None:
    """Refuse ranks that logged different names with `sync_dist=True`.

    Raises:
        ConfigurationError: with the names, by rank.
    """
    everywhere = set.intersection(*map(set, told)) if told else set()
    odd = {name for names in told for name in names if name not in everywhere}
    if not odd:
        return
    by_rank = "; ".join(
        f"{name!r} on rank {', '.join(str(r) for r, names in enumerate(told) if name in names)}"
        for name in sorted(odd)
    )
    raise ConfigurationError(
        f"The {len(told)} ranks logged different names with sync_dist=True: {by_rank} only. Log "
        "the same names on every rank, or give rank_zero_only=True."
    )


def local_value(metric: Any) -> Any:
    """What a torchmetrics object has counted on this rank, without its own exchange."""
    return merged_metric_value(metric, [metric_states(metric)])


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    raise ConfigurationError(
        "A torchmetrics object that self.log was given computes no single number but "
        f"{describe(value)}. Compute it in an epoch's end and log its parts."
    )
