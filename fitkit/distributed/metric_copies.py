"""torchmetrics' objects in replicas: copies that count from nothing, and the whole of all counts.

The package needn't be there: its objects are known by what they have.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fitkit import trees

MERGEABLE = ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min")
"""torchmetrics' reductions that may be applied time and again as counts come in."""

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""The arguments of a metric's updates."""


def is_metric(module: nn.Module) -> bool:
    """Whether it counts as torchmetrics' objects do."""
    return hasattr(type(module), "merge_state") and "_defaults" in module.__dict__


def is_metrics(module: nn.Module) -> bool:
    """Whether it is torchmetrics' collection, whose members may share what they count."""
    return hasattr(type(module), "compute_groups") and "_groups" in module.__dict__


def metrics_in(module: nn.Module) -> list[Any]:
    """A module's metrics, without those that are inside of another (as in `MinMaxMetric`)."""
    found: dict[int, Any] = {}

    def look(within: nn.Module) -> None:
        if is_metric(within):
            found[id(within)] = within
        else:
            for child in within.children():
                look(child)

    look(module)
    return list(found.values())


@dataclasses.dataclass
class Counts:
    """What one replica's metric counted in one step.

    Attributes:
        states: by their names.
        updates: how many there were.
        calls: what the updates were given, where states of this kind can't be merged.
    """

    states: dict[str, Any]
    updates: int
    calls: Calls | None


def fresh(metric: Any, children: dict[str, nn.Module | None], device: torch.device) -> Any:
    """A copy of a metric or collection that has counted nothing.

    Args:
        children: the copies of its submodules.
        device: where it counts.
    """
    made = copy.copy(metric)  # which binds `update` to the copy, as a shallow dict wouldn't
    state = made.__dict__
    state["_modules"] = children
    if is_metrics(metric):
        state["_groups"] = copy.deepcopy(metric._groups)
        return made
    state["_defaults"] = dict(metric._defaults)
    begin(made)
    return made if metric.device == device else made.to(device)


def begin(metric: Any) -> None:
    """Let a metric count from nothing, without touching what it has counted."""
    for name in metric._defaults:
        if isinstance(getattr(metric, name), list):
            setattr(metric, name, [])  # `reset` empties lists in place
    metric.reset()
    if not _can_merge(metric):
        _record(metric)


def counts_of(metric: Any) -> Counts:
    """What a metric has counted since `begin`."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    recorded = vars(metric).get("_recorded")
    calls = None if recorded is None else list(recorded)
    return Counts(states, metric._update_count, calls)


def take_up(metric: Any, counts: Counts) -> None:
    """Add what a replica's metric counted, later than what the metric has counted by now."""
    if counts.calls is not None:
        for args, kwargs in _moved(counts.calls, metric.device):
            metric.update(*args, **kwargs)
        return
    if not counts.updates:
        return
    older = copy.copy(metric)
    # torchmetrics takes the one that is given as the older one: its rows come first.
    vars(metric).update(_moved(counts.states, metric.device))
    metric._update_count = older._update_count + counts.updates
    metric._computed = None
    metric.merge_state(older)


def _moved(tree: Any, device: torch.device) -> Any:
    return trees.map_leaves(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _can_merge(metric: Any) -> bool:
    """Whether its states can be merged again and again; else its updates are made once more."""
    if any(is_metric(child) for child in metric.modules() if child is not metric):
        return False
    if type(metric).merge_state.__module__ != "torchmetrics.metric":
        return True  # a way of its own
    names = [getattr(reduction, "__name__", "") for reduction in metric._reductions.values()]
    plain = metric.full_state_update is False and not metric.dist_sync_on_step
    return plain and all(name in MERGEABLE for name in names)


class _Recorded(Calls):
    """Notes the calls of a metric's `update` and `forward`, which itself calls `update`."""

    def __init__(self) -> None:
        super().__init__()
        self._is_within = False

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its outermost calls noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._is_within:
                return function(*args, **kwargs)
            self.append((args, kwargs))
            self._is_within = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_within = False

        return noted


def _record(metric: Any) -> None:
    recorded = _Recorded()
    vars(metric).update(
        _recorded=recorded,
        update=recorded.noting(metric.update),
        forward=recorded.noting(metric.forward),
    )
