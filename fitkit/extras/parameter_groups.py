"""Parameter groups for optimizers: which parameters decay, and at which rates they learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.layer_depths import scales_of
from fitkit.seams.optimizers import check_layer_decay

Chooses = Callable[[str, nn.Parameter], bool]
"""A function of a parameter's name and the parameter that returns a bool."""


def parameter_groups(
    net: nn.Module,
    *,
    weight_decay: float | None = None,
    decays: Chooses | None = None,
    learning_rate: float | Callable[[str], float | None] | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Make parameter groups for an optimizer: weight decay for matrices only, rates by name or by
    layer.

    Args:
        net: a net or a `fitkit.Model`.
        weight_decay: the weight decay of the parameters that decay. Default None: the optimizer's
            own.
        decays: a function of a parameter's name and the parameter that returns whether it decays.
            Default: if it has two or more dimensions. Biases and the scales of normalizations
            don't.
        learning_rate: a number, or a function from a parameter's name to its rate (or to None for
            the optimizer's own). Default None: the optimizer's own.
        layer_decay: the factor of the rates from each layer to the one before it, above 0 and up to
            1, as of `compile`. It needs `learning_rate`, the last layer's. Default None: 1.

    Returns:
        One group for each pair of a rate and a decay, in the order of `net.named_parameters()`.
        With `layer_decay`, the last layer's come first.

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
    weight_decay = check_number("weight_decay", weight_decay, minimum=0, optional=True)
    if not callable(learning_rate):
        learning_rate = check_number("learning_rate", learning_rate, minimum=0, optional=True)
    if decays is not None and not callable(decays):
        raise ArgumentTypeError(
            f"decays={describe(decays)} must be a function (name, parameter) -> bool."
        )
    layer_decay = check_layer_decay(layer_decay)
    if layer_decay is not None and learning_rate is None:
        raise ConfigurationError(
            f"layer_decay={layer_decay} needs learning_rate, the rate of the last layer. Or leave "
            "the groups to compile(layer_decay=…)."
        )
    scales = {} if layer_decay is None else scales_of(_own_module(net), layer_decay)
    groups: dict[tuple[float, float | None, bool], dict[str, Any]] = {}
    for name, parameter in named:
        rate = learning_rate(name) if callable(learning_rate) else learning_rate
        rate = check_number(f"learning_rate({name!r})", rate, minimum=0, optional=True)
        does = parameter.ndim >= 2 if decays is None else bool(decays(name, parameter))
        scale = scales.get(id(parameter), 1.0)
        group = groups.setdefault((scale, rate, does), {"params": []})
        group["params"].append(parameter)
        if layer_decay is not None:
            group["lr_scale"] = scale
            rate = None if rate is None else rate * scale
        if rate is not None:
            group["lr"] = float(rate)
        if not does:
            group["weight_decay"] = 0.0
        elif weight_decay is not None:
            group["weight_decay"] = float(weight_decay)
    if layer_decay is None:
        return list(groups.values())
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], not key[2]))]


def in_layers(
    net: nn.Module, layer_decay: float, parameters: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return groups for an optimizer: by layer, the last first, and by whether weights decay."""
    scales = scales_of(_own_module(net), layer_decay)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for parameter in parameters:
        # A loss's own parameters are in no layer.
        key = scales.get(id(parameter), 1.0), parameter.ndim >= 2
        group = groups.setdefault(key, {"params": [], "lr_scale": key[0]})
        group["params"].append(parameter)
        if not key[1]:
            group["weight_decay"] = 0.0
    return [groups[key] for key in sorted(groups, reverse=True)]


def named_parameters(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a net's parameters with the net's own names, even if a Model wraps it.

    Raises:
        ArgumentTypeError: `net` isn't a module, for example if it is the parameters.
    """
    if not isinstance(net, nn.Module):
        raise ArgumentTypeError(
            f"net={describe(net)} must be a torch.nn.Module, whose parameters have names."
        )
    return list(_own_module(net).named_parameters())


def _own_module(net: nn.Module) -> nn.Module:
    """Return the net of a `Model` that only wraps it; other nets themselves."""
    wrapped: Any = getattr(net, "_weights_module", None)
    return wrapped() if callable(wrapped) else net
