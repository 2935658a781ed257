"""Parameter groups for optimizers: which parameters decay, and at which rates they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError

Chooses = Callable[[str, nn.Parameter], bool]
"""A function of a parameter's name and the parameter that returns a bool."""


def parameter_groups(
    net: nn.Module,
    *,
    weight_decay: float | None = None,
    decays: Chooses | None = None,
    learning_rate: float | Callable[[str], float | None] | None = None,
) -> list[dict[str, Any]]:
    """Make parameter groups for an optimizer: weight decay for matrices only, rates by name.

    Args:
        net: a net or a `fitkit.Model`.
        weight_decay: the weight decay of the parameters that decay. Default None: the optimizer's
            own.
        decays: a function of a parameter's name and the parameter that returns whether it decays.
            Default: if it has two or more dimensions. Biases and the scales of normalizations
            don't.
        learning_rate: a number, or a function from a parameter's name to its rate (or to None for
            the optimizer's own). Default None: the optimizer's own.

    Returns:
        One group for each pair of a rate and a decay, in the order of `net.named_parameters()`.

    Raises:
        ArgumentTypeError, ConfigurationError: an argument is invalid.

    Example:
        >>> import torch, fitkit
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> rate = lambda name: 1e-3 if name.startswith("2.") else 1e-4
        >>> groups = fitkit.optimizers.parameter_groups(net, weight_decay=0.1, learning_rate=rate)
        >>> [(group["lr"], group["weight_decay"]) for group in groups]
        [(0.0001, 0.1), (0.0001, 0.0), (0.001, 0.1), (0.001, 0.0)]
        >>> model = fitkit.Model(net)
        >>> model.compile(torch.optim.AdamW(groups), "cross_entropy")
    """
    named = named_parameters(net)
    check_number("weight_decay", weight_decay, minimum=0, optional=True)
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, minimum=0, optional=True)
    if decays is not None and not callable(decays):
        raise ArgumentTypeError(
            f"decays={describe(decays)} must be a function (name, parameter) -> bool."
        )
    groups: dict[tuple[float | None, bool], dict[str, Any]] = {}
    for name, parameter in named:
        rate = learning_rate(name) if callable(learning_rate) else learning_rate
        check_number(f"learning_rate({name!r})", rate, minimum=0, optional=True)
        does = parameter.ndim >= 2 if decays is None else bool(decays(name, parameter))
        group = groups.setdefault((rate, does), {"params": []})
        group["params"].append(parameter)
        if rate is not None:
            group["lr"] = float(rate)
        if not does:
            group["weight_decay"] = 0.0
        elif weight_decay is not None:
            group["weight_decay"] = float(weight_decay)
    return list(groups.values())


def named_parameters(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a net's parameters with the net's own names, even if a Model wraps it.

    Raises:
        ArgumentTypeError: `net` isn't a module, for example if it is the parameters.
    """
    if not isinstance(net, nn.Module):
        raise ArgumentTypeError(
            f"net={describe(net)} must be a torch.nn.Module, whose parameters have names."
        )
    wrapped: Any = getattr(net, "_weights_module", None)
    return list((wrapped() if callable(wrapped) else net).named_parameters())
