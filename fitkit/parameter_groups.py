"""Parameter groups for optimizers, and Muon together with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError

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
    named = _named_parameters(net)
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


def muon(
    net: nn.Module,
    learning_rate: float | None = None,
    *,
    hidden: Chooses | None = None,
    adamw: dict[str, Any] | None = None,
    **options: Any,
) -> list[Optimizer]:
    """Make `torch.optim.Muon` for the hidden matrices and AdamW for all other parameters.

    Hidden matrices are the parameters with two dimensions, except those of embeddings and of the
    head. Embeddings are `nn.Embedding` and `nn.EmbeddingBag`, even if another layer shares their
    weights, and parameters with "embed" in their names. The head is the last `nn.Linear` of the
    net. Convolutions go to AdamW, because torch's Muon takes matrices only. `compile("muon")` makes
    the same optimizers.

    Args:
        net: a net or a `fitkit.Model`.
        learning_rate: the rate of both. Default None: torch's own. With
            `adjust_lr_fn="match_rms_adamw"` Muon's updates have the size of AdamW's, so one rate
            suits both.
        hidden: a function of a parameter's name and the parameter that returns whether Muon trains
            it. It replaces the rule above.
        adamw: AdamW's own arguments, such as `{"lr": 3e-4, "betas": (0.9, 0.95)}`.
        **options: Muon's own arguments (`momentum`, `weight_decay`, `adjust_lr_fn`, …).

    Returns:
        Both optimizers in a list, for `compile`. Only one, if the other would have no parameters.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid, or `hidden` chooses a
            parameter that isn't a matrix.

    Example:
        >>> import torch, fitkit
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        ... )
        >>> model = fitkit.Model(net)
        >>> model.compile(fitkit.optimizers.muon(net, 0.02, adamw={"lr": 3e-4}), "cross_entropy")
    """
    named = _named_parameters(net)
    check_number("learning_rate", learning_rate, minimum=0, optional=True)
    if hidden is not None and not callable(hidden):
        raise ArgumentTypeError(
            f"hidden={describe(hidden)} must be a function (name, parameter) -> bool."
        )
    chosen = hidden_matrices(net) if hidden is None else {id(p) for n, p in named if hidden(n, p)}
    wrong = [f"{n} {tuple(p.shape)}" for n, p in named if id(p) in chosen and p.ndim != 2]
    if wrong:
        raise ConfigurationError(
            f"hidden chooses {', '.join(wrong[:3])}{', …' if len(wrong) > 3 else ''}, but Muon "
            "trains parameters of two dimensions only. Leave these to AdamW."
        )
    return muon_beside_adamw([p for _, p in named], chosen, learning_rate, adamw, options)


def muon_beside_adamw(
    parameters: Iterable[nn.Parameter],
    hidden: set[int],
    learning_rate: float | None,
    adamw: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> list[Optimizer]:
    """Make Muon over the parameters with these ids, and AdamW over the others."""
    held = list(parameters)
    rate = {} if learning_rate is None else {"lr": float(learning_rate)}
    matrices = [p for p in held if id(p) in hidden]
    others = [p for p in held if id(p) not in hidden]
    made: list[Optimizer] = []
    kinds: list[Any] = [Muon, AdamW]
    for kind, own, given in zip(kinds, (matrices, others), (options, adamw), strict=True):
        try:
            made += [kind(own, **{**rate, **(given or {})})] if own else []
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{kind.__name__} refuses its arguments: {error}") from error
    return made


def hidden_matrices(net: nn.Module) -> set[int]:
    """The ids of the parameters for Muon, by the rule that `muon` describes."""
    apart: set[int] = set()
    head: nn.Linear | None = None
    for module in net.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            apart.add(id(module.weight))
        elif isinstance(module, nn.Linear):
            head = module
    if head is not None:
        apart.add(id(head.weight))
    return {
        id(parameter)
        for name, parameter in net.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in apart and "embed" not in name.lower()
    }


def _named_parameters(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A net's parameters with the net's own names, even if a Model wraps it.

    Raises:
        ArgumentTypeError: `net` isn't a module, for example if it is the parameters.
    """
    if not isinstance(net, nn.Module):
        raise ArgumentTypeError(
            f"net={describe(net)} must be a torch.nn.Module, whose parameters have names."
        )
    wrapped: Any = getattr(net, "_weights_module", None)
    return list((wrapped() if callable(wrapped) else net).named_parameters())
