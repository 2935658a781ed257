"""What `self.log` takes: how a value is reduced and shown, and which values can be."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError

REDUCTIONS = ("mean", "sum", "min", "max")
"""How a name's values become one."""


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """The options of `self.log` for a name.

    Attributes:
        on_step: whether batches' logs have the latest value.
        on_epoch: whether the epoch's logs have the reduced one.
        prog_bar: whether the progress bar shows it.
        reduce_fx: one of `REDUCTIONS`.
        sync_dist: whether all ranks must log it, and batches' values are the ranks' together.
        rank_zero_only: whether rank 0's value stands for all.
    """

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    reduce_fx: str
    sync_dist: bool
    rank_zero_only: bool

    def names(self, name: str) -> tuple[str, str]:
        """The names of the step's and of the epoch's value."""
        if self.on_step and self.on_epoch:
            return f"{name}_step", f"{name}_epoch"
        return name, name


def reduction_named(reduce_fx: Any) -> str:
    """One of `REDUCTIONS`, from its name or from torch's or Python's function of that name."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", None)
    if name in REDUCTIONS:
        return str(name)
    if name in ("amin", "amax"):
        return name[1:]
    raise ConfigurationError(
        f"reduce_fx={describe(reduce_fx)} must be one of {', '.join(REDUCTIONS)}."
    )


def merged(reduce_fx: str, states: list[tuple[float, float]]) -> float | None:
    """One value from several `Running.state`s; None where none has samples."""
    held = [(value, samples) for value, samples in states if samples]
    if not held:
        return None
    if reduce_fx == "mean":
        return sum(value for value, _ in held) / sum(samples for _, samples in held)
    values = [value for value, _ in held]
    return {"sum": sum(values), "min": min(values), "max": max(values)}[reduce_fx]


def as_loggable(name: str, value: Any) -> Any:
    """A value for `Logged.add`: a detached 0-d tensor, or a torchmetrics object as it is.

    Raises:
        ArgumentTypeError, ConfigurationError: no number, or several.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigurationError(
                f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}. Log one number: "
                "for example its .mean()."
            )
        return value.detach().reshape(())
    if is_metric(value):
        return value
    if isinstance(value, numbers.Real) or getattr(value, "shape", None) == ():
        return torch.tensor(float(value), dtype=torch.float64)
    hint = " Use self.log_dict for a dict." if hasattr(value, "items") else ""
    raise ArgumentTypeError(
        f"self.log({name!r}) got {describe(value)}; it takes a number, a tensor with one number "
        f"or a torchmetrics.Metric.{hint}"
    )


def is_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics object; asks without importing torchmetrics."""
    return isinstance(value, torch.nn.Module) and hasattr(value, "_reductions")


def joined_values(values: list[tuple[Any, int]], reduce_fx: str) -> tuple[Any, int]:
    """The values that replicas logged for their parts of a batch, as one for the batch.

    Args:
        values: of each replica, with its number of samples.
        reduce_fx: how the name's values become one.

    Returns:
        The value, and the samples of all.
    """
    samples = sum(count for _, count in values)
    if not isinstance(values[0][0], torch.Tensor):
        return values[0][0], samples
    device = values[0][0].device
    stacked = torch.stack([value.to(device).double() for value, _ in values])
    if reduce_fx == "mean":
        counts = stacked.new_tensor([count for _, count in values])
        return stacked @ (counts / counts.sum()), samples
    return getattr(torch, {"min": "amin", "max": "amax"}.get(reduce_fx, "sum"))(stacked), samples
