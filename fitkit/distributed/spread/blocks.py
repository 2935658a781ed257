"""Which submodules are gathered as one when their turn comes."""

from __future__ import annotations

from typing import Any

from torch import nn

from fitkit.activation_checkpointing import UNCALLED, repeated
from fitkit.arguments import check_choice, check_count, describe
from fitkit.errors import ArgumentTypeError

WITHOUT_FORWARD = (
    *UNCALLED,
    nn.modules.linear.NonDynamicallyQuantizableLinear,  # in nn.MultiheadAttention
)
"""What nobody calls, so that nothing could be gathered at its call."""


def check_wrap(wrap: Any) -> None:
    """Refuse what says of no submodule whether it is gathered apart."""
    if wrap is None or isinstance(wrap, str):
        check_choice("wrap", wrap, ("blocks", None))
    elif _are_classes(wrap):
        return
    elif isinstance(wrap, (tuple, bool)) or not isinstance(wrap, int):
        raise ArgumentTypeError(
            f"wrap={describe(wrap)} must be 'blocks', a number of parameters, a module class, a "
            "tuple of module classes, or None."
        )
    else:
        check_count("wrap", wrap)


def _are_classes(given: Any) -> bool:
    kinds = given if isinstance(given, tuple) and given else (given,)
    return all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)


def blocks_of(module: nn.Module, wrap: Any) -> list[nn.Module]:
    """The submodules to shard separately, inner ones first. Other parameters belong to the root.

    A submodule that shares a parameter with something outside it (tied weights) isn't among them:
    two groups can't share one.

    Args:
        wrap: `"blocks"` selects the outermost submodules of several parts that have siblings of the
            same class. A number selects the smallest submodules with at least that many parameters
            that aren't in a smaller one. A class or a tuple of classes selects those. None: none.
    """
    candidates = [
        child
        for child in module.modules()
        if child is not module
        and not isinstance(child, WITHOUT_FORWARD)
        and next(child.parameters(), None) is not None
        and not _shares(module, child)
    ]
    if wrap is None:
        return []
    if wrap == "blocks":
        able = set(candidates)
        return repeated(module, lambda child: child in able)
    if isinstance(wrap, int):
        return _of_size(candidates, wrap)
    return [child for child in reversed(candidates) if isinstance(child, wrap)]


def _of_size(candidates: list[nn.Module], least: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    taken: set[int] = set()
    for child in reversed(candidates):  # a module comes before its parts
        free = {id(p): p.numel() for p in child.parameters() if id(p) not in taken}
        if sum(free.values()) >= least:
            found.append(child)
            taken.update(free)
    return found


def _shares(module: nn.Module, child: nn.Module) -> bool:
    """Whether a submodule has a parameter that is somewhere outside it too."""
    inside = {id(part) for part in child.modules()}
    own = {id(parameter) for parameter in child.parameters()}
    return any(
        id(parameter) in own
        for part in module.modules()
        if id(part) not in inside
        for parameter in part.parameters(recurse=False)
    )
