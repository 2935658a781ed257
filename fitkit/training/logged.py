"""What steps and hooks log in a pass, and its values over all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError
from fitkit.metrics.torchmetrics_adapter import merged_metric_value, metric_states
from fitkit.module import LogOptions, merged
from fitkit.scopes import Scope
from fitkit.training.running_values import Running


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
                "called in a later step. Call it from the first step on, on every rank.",
                code="FK043",
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
                if options.on_step and first[-1]["latest"] is not None:
                    found[step] = first[-1]["latest"]  # not that before an interruption
                if entry is not None and options.on_epoch:
                    found[epoch] = _number(
                        merged_metric_value(entry.metric, [state["metric"] for state in held])
                    )
                continue
            counted = first if options.rank_zero_only else held
            if options.on_epoch:
                value = merged(options.reduce_fx, [state["running"] for state in counted])
                if value is not None:
                    found[epoch] = value
            if options.on_step:
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
        "Log the same names on every rank, or give rank_zero_only=True.",
        code="FK043",
    )


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    raise ConfigurationError(
        f"self.log got a torchmetrics object that computes {describe(value)}, not one number. "
        "Compute it at the end of the epoch, and log its parts."
    )
