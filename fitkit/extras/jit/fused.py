"""Torch's fused optimizers as one operation each in a compiled graph.

Traced tensor by tensor, Adam of 28 tensors takes more than half of a transformer's compilation. As
one operation it takes none, and each step has the bits of an eager fused one. Optimizers of few
small tensors stay traced: there the compiler joins them to the rest of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

FEWEST_TENSORS, FEWEST_NUMBERS = 8, 2**16
"""From how many tensors, or numbers in them, on an optimizer's step is one operation."""

Lists = Sequence[Sequence[Any]]
"""An optimizer's states, as `Group.states`: a list for each kind, in the order of its function."""

Update = Callable[[Sequence[Any], Sequence[Any], Lists, torch.Tensor, dict[str, Any]], None]
"""Makes an update; traced. It takes parameters, gradients, states, the rate () and settings."""


def fused(
    kind: type[Optimizer], parameters: Sequence[nn.Parameter], states: Lists, settings: Any
) -> Update | None:
    """Return what makes a group's updates in one operation; None if it should be traced.

    Args:
        kind: the optimizer's class.
        parameters: those that have gradients.
        states: their states.
        settings: the arguments of torch's function for the update.
    """
    found = UPDATES.get(kind)
    enough = len(parameters) >= FEWEST_TENSORS or _numbers(parameters) >= FEWEST_NUMBERS
    if found is None or not enough or not hasattr(torch, NEWEST):
        return None
    if not all(isinstance(one, (bool, int, float, type(None))) for one in settings.values()):
        return None
    dtypes = {one.dtype for one in parameters}
    tensors = [*parameters, *(one for of_kind in states for one in of_kind if one is not None)]
    plain = all(one.is_cpu and one.is_contiguous() for one in tensors)
    if not plain or len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    _library()
    return found


def _numbers(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _adam(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Lists,
    rate: torch.Tensor,
    settings: dict[str, Any],
) -> None:
    numbers = [float(settings[name]) for name in ("beta1", "beta2", "weight_decay", "eps")]
    flags = [bool(settings[name]) for name in ("amsgrad", "maximize")]
    # `torch.optim.adamw.adamw` has no such argument: it always decays so.
    flags.append(bool(settings.get("decoupled_weight_decay", True)))
    torch.ops.fitkit.adam(parameters, gradients, *states, rate, numbers, flags)


def _sgd(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Lists,
    rate: torch.Tensor,
    settings: dict[str, Any],
) -> None:
    numbers = [float(settings[name]) for name in ("weight_decay", "momentum", "dampening")]
    flags = [bool(settings[name]) for name in ("nesterov", "maximize")]
    momenta = states[0] if settings["momentum"] else []
    torch.ops.fitkit.sgd(parameters, gradients, momenta, rate, numbers, flags)


def _adagrad(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Lists,
    rate: torch.Tensor,
    settings: dict[str, Any],
) -> None:
    numbers = [float(settings[name]) for name in ("lr_decay", "weight_decay", "eps")]
    flags = [bool(settings["maximize"])]
    torch.ops.fitkit.adagrad(parameters, gradients, *states, rate, numbers, flags)


UPDATES: dict[type[Optimizer], Update] = {
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.SGD: _sgd,
    optim.Adagrad: _adagrad,
}

NEWEST = "_fused_adagrad_"
"""The last one of torch's fused functions that got a kernel for CPUs."""


# ------------------------------------------------------------------ the operations


SCHEMAS = {
    "adam": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, "
    "Tensor(c!)[] squares, Tensor(d!)[] most, Tensor(e!)[] steps, "
    "Tensor rate, float[] numbers, bool[] flags) -> ()",
    "sgd": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] momenta, "
    "Tensor rate, float[] numbers, bool[] flags) -> ()",
    "adagrad": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] sums, "
    "Tensor(c!)[] steps, Tensor rate, float[] numbers, bool[] flags) -> ()",
}


@functools.cache
def _library() -> torch.library.Library:
    """Tell torch of the operations; they live as long as what is returned."""
    library = torch.library.Library("fitkit", "FRAGMENT")
    computed = {"adam": _compute_adam, "sgd": _compute_sgd, "adagrad": _compute_adagrad}
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, computed[name], "CPU")
        torch.library.register_fake(f"fitkit::{name}", _shapeless, lib=library)
    return library


def _shapeless(*given: Any) -> None:
    """Compute nothing: an update returns nothing, and changes no shape."""


def _compute_adam(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    most: list[torch.Tensor],
    steps: list[torch.Tensor],
    rate: torch.Tensor,
    numbers: list[float],
    flags: list[bool],
) -> None:
    beta1, beta2, decay, eps = numbers
    amsgrad, maximize, decoupled = flags
    torch._foreach_add_(steps, 1)
    update: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        parameters, _contiguous(gradients), means, squares, most, steps,
        lr=rate.item(), beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
        amsgrad=amsgrad, maximize=maximize,
    )  # fmt: skip


def _compute_sgd(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
    rate: torch.Tensor,
    numbers: list[float],
    flags: list[bool],
) -> None:
    decay, momentum, dampening = numbers
    nesterov, maximize = flags
    torch._fused_sgd_(
        parameters, _contiguous(gradients), momenta,
        weight_decay=decay, momentum=momentum, lr=rate.item(), dampening=dampening,
        nesterov=nesterov, maximize=maximize, is_first_step=False,
    )  # fmt: skip


def _compute_adagrad(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    sums: list[torch.Tensor],
    steps: list[torch.Tensor],
    rate: torch.Tensor,
    numbers: list[float],
    flags: list[bool],
) -> None:
    slower, decay, eps = numbers
    torch._foreach_add_(steps, 1)
    torch._fused_adagrad_(
        parameters, _contiguous(gradients), sums, steps,
        lr=rate.item(), lr_decay=slower, weight_decay=decay, eps=eps, maximize=flags[0],
    )  # fmt: skip


def _contiguous(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients in the order of their parameters, for kernels that read plain memory."""
    return [gradient.contiguous() for gradient in gradients]
