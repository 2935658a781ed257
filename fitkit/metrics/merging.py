"""Metrics' states of several ranks as one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fitkit.metrics.sums import Call, Mean
from fitkit.metrics.torchmetrics_adapter import Wrapped

if TYPE_CHECKING:
    from torchmetrics import Metric

Sums = Mean | Call | Wrapped
State = dict[str, Any]


def state_of(one: Sums) -> State:
    """What a one has summed up, on the CPU: plain data that can be sent."""
    if not isinstance(one, Wrapped):
        return {"updated": one.totals.updated, "totals": one.totals.summed().tolist()}
    if getattr(one, "leader", None) is not None:
        return {"samples": one.samples}
    return {"samples": one.samples, "states": metric_states(one.metric)}


def metric_states(metric: Metric) -> State:
    """What a torchmetrics object has counted, on the CPU: plain data that can be sent."""
    found: State = {}
    for name in metric._reductions:
        value = getattr(metric, name)
        if isinstance(value, list):
            rows = [
                part.detach().cpu() if part.ndim else part.detach().cpu()[None] for part in value
            ]
            found[name] = [torch.cat(rows)] if rows else []
        else:
            # A copy on the CPU too: later updates change the state in place.
            found[name] = value.detach().to("cpu", copy=True)
    return found


def load_merged(one: Sums, states: list[State]) -> None:
    """Give a one the state of all ranks together.

    Args:
        states: each rank's `state_of` the same one.
    """
    if not isinstance(one, Wrapped):
        totals = torch.tensor([state["totals"] for state in states], dtype=torch.float64)
        one.totals.reset()
        one.totals.state.copy_(totals.sum(0))
        one.totals.updated = any(state["updated"] for state in states)
        return
    one.samples = sum(state["samples"] for state in states)
    if getattr(one, "leader", None) is None:
        _load_metric(one.metric, [state["states"] for state in states if state["samples"]])


def _load_metric(metric: Metric, states: list[State]) -> None:
    """As torchmetrics itself merges states: by each state's own reduction."""
    if not states:
        return
    reductions: dict[str, Any] = metric._reductions
    for name, reduction in reductions.items():
        values = [state[name] for state in states]
        merged: Any
        if isinstance(values[0], list):
            merged = [part.to(metric.device) for value in values for part in value]
            merged = merged if reduction is None or not merged else reduction(merged)
            if isinstance(merged, Tensor):
                merged = [merged]
        else:
            stacked = torch.stack([value.to(metric.device) for value in values])
            merged = stacked if reduction is None else reduction(stacked)
        setattr(metric, name, merged)
    metric._update_count = max(metric._update_count, 1)
    metric._computed = None


def merged_metric_value(metric: Metric, states: list[State]) -> Any:
    """What a torchmetrics object computes from the states of several ranks; it stays as it is.

    Args:
        states: each rank's `metric_states`.
    """
    whole = copy.deepcopy(metric)
    # Else it would exchange its states with the other ranks once more.
    whole.sync_on_compute = whole._to_sync = False
    _load_metric(whole, states)
    return whole.compute()
