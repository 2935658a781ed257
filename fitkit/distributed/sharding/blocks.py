"""Which submodules are gathered as one when their turn comes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that nobody calls, so that nothing could be gathered at their call."""


def blocks_of(module: nn.Module, wrap: Any) -> list[nn.Module]:
    """The submodules to shard apart, inner ones first; all other parameters belong to the root.

    A submodule that has a parameter in common with something outside it (tied weights) isn't
    among them: two groups can't share one.

    Args:
        wrap: `"blocks"` for the outermost submodules of several parts that stand side by side
            with others of their class; a number for the smallest submodules with at least that
            many parameters that aren't in a smaller one; a class or a tuple of classes; None for
            none.
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
        return _repeated(module, candidates)
    if isinstance(wrap, int):
        return _of_size(candidates, wrap)
    return [child for child in reversed(candidates) if isinstance(child, wrap)]


def _repeated(module: nn.Module, candidates: list[nn.Module]) -> list[nn.Module]:
    """The outermost submodules with parts that have a sibling of their class."""
    able = {id(child) for child in candidates if next(child.children(), None) is not None}
    found: list[nn.Module] = []
    waiting = [module]
    while waiting:
        parent = waiting.pop()
        kinds = Counter(type(child) for child in parent.children())
        for child in parent.children():
            if id(child) in able and kinds[type(child)] > 1:
                if not any(child is other for other in found):
                    found.append(child)
            else:
                waiting.append(child)
    return found


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
