"""Muon for hidden matrices, beside AdamW for all other parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.parameter_groups import Chooses, named_parameters
from fitkit.seams.optimizers import Arranges


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
    named = named_parameters(net)
    learning_rate = check_number("learning_rate", learning_rate, minimum=0, optional=True)
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
    rate = {} if learning_rate is None else {"lr": float(learning_rate)}
    return _made([p for _, p in named], chosen, {**rate, **options}, {**rate, **(adamw or {})})


def beside_adamw(
    net: nn.Module, parameters: list[nn.Parameter], options: dict[str, Any], arranged: Arranges
) -> list[Optimizer]:
    """Make what `compile("muon")` means: Muon with these options, and AdamW at the same rate."""
    rate = {"lr": options["lr"]} if "lr" in options else {}
    return _made(parameters, hidden_matrices(net), options, rate, arranged)


def _made(
    parameters: list[nn.Parameter],
    hidden: set[int],
    options: dict[str, Any],
    adamw: dict[str, Any],
    arranged: Arranges = list,
) -> list[Optimizer]:
    """Make Muon over the parameters with these ids, and AdamW over the others."""
    matrices = [p for p in parameters if id(p) in hidden]
    others = [p for p in parameters if id(p) not in hidden]
    made: list[Optimizer] = []
    kinds: list[Any] = [Muon, AdamW]
    for kind, own, given in zip(kinds, (matrices, others), (options, adamw), strict=True):
        try:
            made += [kind(arranged(own), **given)] if own else []
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{kind.__name__} refuses its arguments: {error}") from error
    return made


def hidden_matrices(net: nn.Module) -> set[int]:
    """Return the ids of the parameters for Muon, by the rule that `muon` describes."""
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
